"""Hop 9, in full: outputs → a completion."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from sterna.protocol.finish import openai_name
from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.generation import Full
from sterna.server.logprobs import Spelling
from sterna.server.openai.completion.protocol import CompletionChoice, CompletionLogprobs, CompletionResponse
from sterna.server.openai.fields import matched_stop, usage_of

_utf8_decoder = getincrementaldecoder("utf-8")


def to_response(rid: str, created: int, model: str, outputs: list[Full], spelling: Spelling | None) -> CompletionResponse:
    """One choice per prompt; with logprobs where there is a `spelling` for their tokens."""
    choices = [
        CompletionChoice(
            index=index,
            text=output.text,
            logprobs=None if spelling is None else LogprobLists(spelling).take(output.output_ids, output.logprobs),
            finish_reason=openai_name(output.finished_reason),
            matched_stop=matched_stop(output.finished_reason),
        )
        for index, output in enumerate(outputs)
    ]
    return CompletionResponse(id=rid, created=created, model=model, choices=choices, usage=usage_of([output.reader for output in outputs]))


class LogprobLists:
    """Of one output, piece by piece: it knows how far the text has got."""

    __slots__ = ("_decoder", "_offset", "_spelling")

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = _utf8_decoder("replace")
        self._offset = 0

    def take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of the next tokens, `ids`. A token that begins inside a character has the offset of that character."""
        lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, each in zip(ids, logprobs, strict=True):
            text, data = self._spelling.name(token_id)
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(data)))
            lists.token_logprobs.append(each.chosen)
            lists.tokens.append(text)
            top: dict[str, float] = {}
            for name, logprob in self._spelling.top(each):
                top.setdefault(name.text, logprob)
            top.setdefault(text, each.chosen)
            lists.top_logprobs.append(top)
        return lists
