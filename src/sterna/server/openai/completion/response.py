"""Hop 9, in full: outputs → a completion."""

from __future__ import annotations

from sterna.protocol.finish import openai_name
from sterna.server.generation import Full
from sterna.server.logprobs import Spelling
from sterna.server.openai.completion.logprobs import LogprobLists
from sterna.server.openai.completion.protocol import CompletionChoice, CompletionResponse
from sterna.server.openai.fields import matched_stop, usage_of


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
