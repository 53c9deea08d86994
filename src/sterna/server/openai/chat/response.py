"""Hop 9, in full: an output → a chat completion."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.protocol.finish import openai_name
from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.generation import Full
from sterna.server.logprobs import Spelling
from sterna.server.openai.chat.protocol import (
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatResponseMessage,
    ChatTokenLogprob,
    TopLogprob,
)
from sterna.server.openai.fields import matched_stop, usage_of


def to_response(rid: str, created: int, model: str, outputs: list[Full], spelling: Spelling | None) -> ChatCompletionResponse:
    """One choice per output; with logprobs where there is a `spelling` for their tokens."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatResponseMessage(content=output.text),
            logprobs=None if spelling is None else to_logprobs(output.output_ids, output.logprobs, spelling),
            finish_reason=openai_name(output.finished_reason),
            matched_stop=matched_stop(output.finished_reason),
        )
        for index, output in enumerate(outputs)
    ]
    return ChatCompletionResponse(
        id=rid, created=created, model=model, choices=choices, usage=usage_of([output.reader for output in outputs])
    )


def to_logprobs(ids: Sequence[int], logprobs: Sequence[TokenLogprobs], spelling: Spelling) -> ChatLogprobs:
    """One entry for each of `ids`."""
    content = []
    for token_id, each in zip(ids, logprobs, strict=True):
        text, data = spelling.name(token_id)
        top = [TopLogprob(name.text, logprob, name.data) for name, logprob in spelling.top(each)]
        content.append(ChatTokenLogprob(text, each.chosen, data, top))
    return ChatLogprobs(content)
