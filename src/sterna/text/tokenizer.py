"""Text to token ids and back: the Rust `tokenizers` library behind the few calls that Sterna makes of it.

Equality with transformers: encode and decode are those of `PreTrainedTokenizerFast` with `clean_up_tokenization_spaces` off, which
is its default and which it ignores for BPE vocabularies. Truncation and padding that a tokenizer.json may carry from training are
switched off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sterna.errors import InvalidRequest, ModelError
from sterna.text.token_text import TokenTable, WindowTable, build_table


class Tokenizer:
    """One model's tokenizer. Safe for concurrent calls from threads: nothing that a caller can see changes after construction."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        vocab = inner.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        """Largest id + 1, added tokens included. A model's embedding may have more rows."""
        self.longest_token: int = max(map(len, vocab), default=1)
        """In characters as the vocabulary spells it: a token stands for no more text than that."""
        self._special = frozenset(token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special)
        self._tables: dict[bool, TokenTable] = {}
        self._steps: list[dict[str, Any]] | None = None

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read `tokenizer.json` of a resolved model folder. Raises ModelError where it is absent or damaged."""
        path = folder / "tokenizer.json"
        try:
            return Tokenizer.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as fault:
            raise ModelError(f"{path}: {fault}") from fault
        except ModelError as fault:
            raise ModelError(f"{path}: {fault.message}") from fault

    @staticmethod
    def from_json(source: str) -> Tokenizer:
        """`source` is the content of a tokenizer.json. Raises ModelError where `tokenizers` can't read it."""
        try:
            inner = tokenizers.Tokenizer.from_str(source)
        except Exception as fault:  # the library raises bare Exception
            raise ModelError(f"not a readable tokenizer.json: {fault}") from fault
        return Tokenizer(inner)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens spelled in it become their ids. Raises InvalidRequest for text that isn't Unicode."""
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as fault:
            raise InvalidRequest("the text holds a lone surrogate: it can't be written as UTF-8", param="prompt") from fault
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """Text of `ids`. An id beyond the vocabulary, which a padded embedding can sample, has no text.

        `spaces_between_special_tokens` is part of the request format and has no effect: transformers' `_decode` of a fast tokenizer
        takes it in `**kwargs` and never reads it; only its slow tokenizers put spaces between added tokens.
        """
        return self.decode_batch(
            [ids], skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
        )[0]

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> list[str]:
        """`decode` of each."""
        known = [[token_id for token_id in ids if 0 <= token_id < self.vocab_size] for ids in batch]
        if len(known) == 1:
            return [self._inner.decode(known[0], skip_special_tokens=skip_special_tokens)]
        texts: list[str] = self._inner.decode_batch(known, skip_special_tokens=skip_special_tokens)
        return texts

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None beyond the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out."""
        return token_id in self._special

    def table(self, *, skip_special_tokens: bool) -> TokenTable:
        """What each token adds to the text; made when first asked for, then kept. Raises ModelError for an unsupported decoder."""
        table = self._tables.get(skip_special_tokens)
        if table is None:
            tokens = {
                token_id: token
                for token_id in range(self.vocab_size)
                if not (skip_special_tokens and self.is_special(token_id)) and (token := self.id_to_token(token_id)) is not None
            }
            table = self._tables[skip_special_tokens] = build_table(self._decoder_steps(), tokens)
        return table

    def piece(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun: UTF-8, or a part of a character. An id beyond the vocabulary adds nothing.

        It needs no table. Where a token's text depends on its left neighbour (`WindowTable`) it is what the token is alone.
        """
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        table = build_table(self._decoder_steps(), {token_id: token})
        if isinstance(table, WindowTable):
            return self.decode([token_id], skip_special_tokens=False).encode()
        piece = table.pieces[token_id]
        match piece:
            case int():
                return bytes((piece,))
            case str():
                return piece.encode()
            case _:
                return piece

    def _decoder_steps(self) -> list[dict[str, Any]]:
        if self._steps is None:
            decoder = self._inner.decoder
            self._steps = _flatten(None if decoder is None else json.loads(decoder.__getstate__()))
        return self._steps


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
