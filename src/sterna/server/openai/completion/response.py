"""Hop 9, in full: outputs → a completion."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence

import msgspec

from sterna.protocol.finish import openai_name
from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.generation import Full
from sterna.server.logprobs import JsonList, Spelling
from sterna.server.openai.completion.protocol import CompletionChoice, CompletionLogprobs, CompletionResponse
from sterna.server.openai.fields import matched_stop, usage_of

_utf8_decoder = getincrementaldecoder("utf-8")


def to_response(rid: str, created: int, model: str, outputs: list[Full], lists: Sequence[LogprobLists | None]) -> Iterator[bytes]:
    """The JSON of a `CompletionResponse`, a choice (prompt) at a time. `lists` are the logprobs of each, where they are asked for."""
    usage = usage_of([output.reader for output in outputs])
    empty = msgspec.json.encode(CompletionResponse(id=rid, created=created, model=model, choices=[], usage=usage))
    before, choices, after = empty.partition(b'"choices":[')  # which no string in JSON holds: its quotes would be escaped
    yield before + choices
    for index, (output, shown) in enumerate(zip(outputs, lists, strict=True)):
        if index:
            yield b","
        choice = CompletionChoice(
            index=index,
            text=output.text,
            logprobs=None if shown is None else shown.shown(),
            finish_reason=openai_name(output.finished_reason),
            matched_stop=matched_stop(output.finished_reason),
        )
        yield msgspec.json.encode(choice)
    yield after


class LogprobLists:
    """`logprobs` of one choice: parallel lists, with an entry per output token."""

    __slots__ = ("_decoder", "_offset", "_spelling", "_text_offset", "_token_logprobs", "_tokens", "_top_logprobs")

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = _utf8_decoder("replace")
        self._offset = 0
        """How far the text has got: it is kept where the lists are cleared."""
        self._text_offset = JsonList()
        self._token_logprobs = JsonList()
        self._tokens = JsonList()
        self._top_logprobs = JsonList()

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """See `LogprobSink`. A token that begins inside a character has the offset of that character; one that doesn't go on with the bytes
        that there are of it begins after what stands in their place."""
        offsets, tokens, tops = [], [], []
        for token_id, each in zip(ids, logprobs, strict=True):
            text, data = self._spelling.name(token_id)
            offsets.append(self._offset + self._breaks_off(data))
            self._offset += len(self._decoder.decode(bytes(data)))
            tokens.append(text)
            top: dict[str, float] = {}
            for name, logprob in self._spelling.top(each):
                top.setdefault(name.text, logprob)
            top[text] = each.chosen
            tops.append(top)
        self._text_offset.add(offsets)
        self._token_logprobs.add([each.chosen for each in logprobs])
        self._tokens.add(tokens)
        self._top_logprobs.add(tops)

    def shown(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=self._text_offset.as_list(),
            token_logprobs=self._token_logprobs.as_list(),
            tokens=self._tokens.as_list(),
            top_logprobs=self._top_logprobs.as_list(),
        )

    def clear(self) -> None:
        """Forget the entries so far."""
        for entries in (self._text_offset, self._token_logprobs, self._tokens, self._top_logprobs):
            entries.clear()

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
