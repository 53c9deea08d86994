"""Hop 9, in full: an output → a chat completion."""

from __future__ import annotations

from sterna.protocol.finish import openai_name
from sterna.server.generation import Full
from sterna.server.openai.chat.protocol import ChatChoice, ChatCompletionResponse, ChatResponseMessage
from sterna.server.openai.fields import matched_stop, usage_of


def to_response(rid: str, created: int, model: str, outputs: list[Full]) -> ChatCompletionResponse:
    """One choice per output."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatResponseMessage(content=output.text),
            finish_reason=openai_name(output.finished_reason),
            matched_stop=matched_stop(output.finished_reason),
        )
        for index, output in enumerate(outputs)
    ]
    return ChatCompletionResponse(
        id=rid, created=created, model=model, choices=choices, usage=usage_of([output.reader for output in outputs])
    )
