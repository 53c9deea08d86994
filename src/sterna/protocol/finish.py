"""Why a request ended. Decided by the scheduler; carried, never re-derived, by everyone after it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sterna.errors import (
    Draining,
    EngineCrashed,
    EngineDead,
    EngineError,
    EngineFailure,
    OverloadedError,
    QueueFull,
    RequestError,
    TimedOut,
)


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


def to_finish(error: RequestError | OverloadedError | TimedOut | EngineError) -> FinishAbort:
    """`error` as a value, which can cross the processes (`server/errors.py: error_of` makes it an exception again)."""
    param = error.param if isinstance(error, RequestError) else None
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    return FinishAbort(error.message, error.status, error.code, param, retry_after_s)


ABORTED = FinishAbort("aborted", 499, "aborted")
FAULT = to_finish(EngineFailure("internal error"))
"""Something of ours broke while this request was handled."""
ENGINE_CRASHED = to_finish(EngineCrashed("the engine failed on this request"))
"""It alone makes the engine fail, again and again."""
ENGINE_DEAD = to_finish(EngineDead("the engine has stopped"))
SHUTTING_DOWN = to_finish(Draining("the server is shutting down"))
QUEUE_FULL = to_finish(QueueFull("The request queue is full."))

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
