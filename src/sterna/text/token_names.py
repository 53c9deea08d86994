"""What a single token is called where an answer lists tokens: with their log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

from sterna.text.tokenizer import Tokenizer


class TokenName(NamedTuple):
    text: str
    """Its text. Bytes that are no UTF-8 by themselves are escaped (`\\xe2\\x80`), so that two tokens seldom share a name. One that
    isn't shown is spelled as in the vocabulary."""
    data: tuple[int, ...]
    """The bytes that it adds to an output's text: joined, those of an output's tokens are its text in UTF-8, stops included, unless the
    decoder lets a token's text depend on its neighbours (`Tokenizer.piece`). Empty where it isn't shown."""


class TokenNames:
    """Names of a tokenizer's tokens. Each is made when first asked for, then kept: one for every token of the vocabulary, and another for
    each special one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: dict[int, TokenName] = {}
        self._hidden: dict[int, TokenName] = {}

    def name(self, token_id: int, *, skip_special_tokens: bool) -> TokenName:
        """An id beyond the vocabulary, which a padded embedding can sample, has an empty name."""
        hidden = skip_special_tokens and self._tokenizer.is_special(token_id)
        names = self._hidden if hidden else self._shown
        name = names.get(token_id)
        if name is None:
            name = TokenName(self._tokenizer.id_to_token(token_id) or "", ()) if hidden else self._make(token_id)
            if 0 <= token_id < self._tokenizer.vocab_size:
                names[token_id] = name
        return name

    def _make(self, token_id: int) -> TokenName:
        data = self._tokenizer.piece(token_id)
        return TokenName(data.decode("utf-8", "backslashreplace"), tuple(data))
