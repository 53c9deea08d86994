"""Why a request ended. Decided by the scheduler; carried, never re-derived, by everyone after it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sterna.errors import Draining, EngineFailure, QueueFull


class FinishMatchedToken(msgspec.Struct, frozen=True, tag="token", array_like=True):
    """The last output token is an end token (the model's, or one of `stop_token_ids`)."""

    matched: int
    is_eos: bool
    """Whether it is one of the model's own end tokens."""


class FinishMatchedStr(msgspec.Struct, frozen=True, tag="str", array_like=True):
    """A stop string stands in the output text."""

    matched: str
    token_index: int
    """Index of the output token that completed the match."""
    char_offset: int
    """Where the match begins, in characters of the whole output text."""


class FinishLength(msgspec.Struct, frozen=True, tag="length", array_like=True):
    """`max_new_tokens`, or the end of the context."""

    length: int
    """Output tokens."""


class FinishAbort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Ended by something other than the text: a refusal, an abort, a fault."""

    message: str
    status_code: int
    """The HTTP status that says it best: 400, 429, 499 (the client left), 500, 503, 504."""
    code: str
    """A stable identifier, one of the `code`s of `sterna.errors`, or `aborted`."""
    param: str | None = None
    retry_after_s: int | None = None
    """Of a refusal for load; None is its kind's default."""


ABORTED = FinishAbort("aborted", 499, "aborted")
FAULT = FinishAbort("internal error", EngineFailure.status, EngineFailure.code)
"""Something of ours broke while this request was handled."""
SHUTTING_DOWN = FinishAbort("the server is shutting down", Draining.status, Draining.code)
QUEUE_FULL = FinishAbort("The request queue is full.", QueueFull.status, QueueFull.code)

FinishReason = FinishMatchedToken | FinishMatchedStr | FinishLength | FinishAbort

OpenAIFinish = Literal["stop", "length", "abort"]


def openai_name(reason: FinishReason) -> OpenAIFinish:
    """OpenAI's word for `reason`."""
    match reason:
        case FinishMatchedToken() | FinishMatchedStr():
            return "stop"
        case FinishLength():
            return "length"
        case FinishAbort():
            return "abort"
