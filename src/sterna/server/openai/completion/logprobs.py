"""Hop 9: `TokenLogprobs` → the parallel lists of a completion."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.logprobs import Spelling
from sterna.server.openai.completion.protocol import CompletionLogprobs

_utf8_decoder = getincrementaldecoder("utf-8")


class LogprobLists:
    """Of one output, piece by piece: it knows how far the text has got."""

    __slots__ = ("_decoder", "_offset", "_spelling")

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = _utf8_decoder("replace")
        self._offset = 0

    def take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of the next tokens, `ids`. A token that begins inside a character has the offset of that character; one that doesn't go on
        with the bytes that there are of it begins after what stands in their place."""
        lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, each in zip(ids, logprobs, strict=True):
            text, data = self._spelling.name(token_id)
            lists.text_offset.append(self._offset + self._breaks_off(data))
            self._offset += len(self._decoder.decode(bytes(data)))
            lists.token_logprobs.append(each.chosen)
            lists.tokens.append(text)
            top: dict[str, float] = {}
            for name, logprob in self._spelling.top(each):
                top.setdefault(name.text, logprob)
            top.setdefault(text, each.chosen)
            lists.top_logprobs.append(top)
        return lists

    def _breaks_off(self, data: Sequence[int]) -> int:
        """How many characters (0 or 1) the bytes of an unfinished character come to because `data` isn't its rest."""
        begun = self._decoder.getstate()[0]
        if not begun or not data:
            return 0
        try:
            _utf8_decoder("strict").decode(begun + bytes(data[:1]))
        except UnicodeDecodeError:
            return 1
        return 0
