"""Hop 9, in full: an output → a chat completion."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.protocol.finish import openai_name
from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.generation import Full
from sterna.server.logprobs import JsonList, Spelling
from sterna.server.openai.chat.protocol import (
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatResponseMessage,
    ChatTokenLogprob,
    TopLogprob,
)
from sterna.server.openai.fields import matched_stop, usage_of


def to_response(rid: str, created: int, model: str, outputs: list[Full], entries: Sequence[ChatEntries | None]) -> ChatCompletionResponse:
    """One choice per output; `entries` are the logprobs of each, where they are asked for."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatResponseMessage(content=output.text),
            logprobs=None if shown is None else shown.shown(),
            finish_reason=openai_name(output.finished_reason),
            matched_stop=matched_stop(output.finished_reason),
        )
        for index, (output, shown) in enumerate(zip(outputs, entries, strict=True))
    ]
    return ChatCompletionResponse(
        id=rid, created=created, model=model, choices=choices, usage=usage_of([output.reader for output in outputs])
    )


class ChatEntries:
    """`logprobs` of one choice: an entry per output token."""

    __slots__ = ("_entries", "_spelling")

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._entries = JsonList()

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """See `LogprobSink`."""
        spelling = self._spelling
        entries = []
        for token_id, each in zip(ids, logprobs, strict=True):
            text, data = spelling.name(token_id)
            top = [TopLogprob(name.text, logprob, name.data) for name, logprob in spelling.top(each)]
            entries.append(ChatTokenLogprob(text, each.chosen, data, top))
        self._entries.add(entries)

    def shown(self) -> ChatLogprobs:
        return ChatLogprobs(self._entries.as_list())

    def clear(self) -> None:
        """Forget the entries so far."""
        self._entries.clear()
