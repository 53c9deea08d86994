"""The one mapping from Sterna's errors to HTTP, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from sterna.errors import (
    AuthenticationFailed,
    EngineError,
    EngineFailure,
    InvalidRequest,
    MethodNotAllowed,
    OverloadedError,
    RequestError,
    SternaError,
    TimedOut,
)
from sterna.protocol.finish import FinishAbort

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    """The kind of fault: invalid_request_error, authentication_error, overloaded_error, timeout_error, server_error."""
    param: str | None
    """The field at fault."""
    code: str
    """A stable identifier."""


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


class HttpError(NamedTuple):
    status: int
    headers: list[Header]
    body: bytes
    """JSON of an `ErrorResponse`: the body of a response, or the data of an SSE event."""
    code: str


def to_http(error: BaseException) -> HttpError:
    """What the client sees of `error`. Anything but a SternaError is a fault of ours: logged in full, told in two words."""
    headers: list[Header] = []
    param = None
    match error:
        case RequestError():
            param = error.param
            if isinstance(error, AuthenticationFailed):
                headers.append((b"www-authenticate", b"Bearer"))
            if isinstance(error, MethodNotAllowed):
                headers.append((b"allow", ", ".join(error.allowed).encode()))
        case OverloadedError():
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        case TimedOut():
            pass
        case EngineError():
            log.error("engine error %s: %s", error.code, error.message)
        case _:
            log.error("unexpected fault while a request was handled", exc_info=error)
            error = EngineError("internal error")
    detail = ErrorDetail(error.message, error.error_type, param, error.code)
    return HttpError(error.status, headers, msgspec.json.encode(ErrorResponse(detail)), error.code)


def _tree(root: type[SternaError]) -> Iterator[type[SternaError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_OVERLOADED = {cls.code: cls for cls in _tree(OverloadedError) if issubclass(cls, OverloadedError)}
_TIMED_OUT = {cls.code: cls for cls in _tree(TimedOut) if issubclass(cls, TimedOut)}
_ENGINE = {cls.code: cls for cls in _tree(EngineError) if issubclass(cls, EngineError)}
_REQUEST = {cls.code: cls for cls in _tree(RequestError) if issubclass(cls, RequestError)}


def error_of(finish: FinishAbort) -> RequestError | OverloadedError | TimedOut | EngineError:
    """The exception that `finish` stands for, which crossed the processes as a value.

    Found by `code`; a code that the tree doesn't know is told apart by its status.
    """
    if finish.code in _OVERLOADED:
        return _OVERLOADED[finish.code](finish.message, retry_after_s=finish.retry_after_s)
    if finish.code in _TIMED_OUT:
        return _TIMED_OUT[finish.code](finish.message)
    if finish.code in _ENGINE:
        return _ENGINE[finish.code](finish.message)
    if finish.code in _REQUEST:
        return _REQUEST[finish.code](finish.message, param=finish.param)
    if finish.status_code in (429, 503):
        refusal = OverloadedError(finish.message, code=finish.code, retry_after_s=finish.retry_after_s)
        refusal.status = finish.status_code
        return refusal
    if finish.status_code == 504:
        return TimedOut(finish.message)
    if 400 <= finish.status_code < 500:
        return InvalidRequest(finish.message, param=finish.param, code=finish.code)
    return EngineFailure(finish.message)


def rename_param(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Say it in the surface's words: the core calls a prompt `prompt`, a chat calls it `messages`."""
    if error.param is not None:
        error.param = names.get(error.param, error.param)
    return error
