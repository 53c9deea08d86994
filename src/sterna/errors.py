"""Every exception that Sterna raises on purpose.

SternaError
├─ StartupError              before serving: printed by the CLI, exit code 1
│  ├─ ConfigError            a flag, a port, a combination of flags
│  └─ ModelError             a model that can't be found, fetched, read or supported
├─ RequestError              4xx: the client can mend it
│  ├─ InvalidRequest         400
│  │  ├─ UnsupportedField    400  a field that the API defines and Sterna doesn't build yet
│  │  ├─ ContextLengthExceeded  400
│  │  ├─ DuplicateRid        400
│  │  └─ SessionFull         400  the session's own capacity
│  ├─ AuthenticationFailed   401
│  ├─ ModelNotFound          404
│  ├─ RequestNotFound        404  no such route, rid or object
│  ├─ SessionNotFound        404  no such session, or no such turn in it
│  ├─ MethodNotAllowed       405
│  ├─ SessionBusy            409  a turn goes on from there already
│  └─ PayloadTooLarge        413
├─ OverloadedError           429/503 with Retry-After: nothing wrong with the request
│  ├─ QueueFull              429
│  ├─ TooManyQueuedTokens    429
│  ├─ TooManyConcurrent      429  of one key
│  ├─ WaitingTimeout         503  the scheduler hadn't begun it in time
│  ├─ TooManySessions        429  sessions, or their tokens, of all clients together
│  ├─ NotReady               503  the model is still being loaded
│  └─ Draining               503
├─ TimedOut                  504: it was begun, or could have been, and took too long
│  ├─ RunningTimeout         504  the server's limit
│  └─ DeadlineExceeded       504  the request's own `timeout`
└─ EngineError               500/503: generic body, full log
   ├─ EngineFailure          500  a fault while this request was handled
   ├─ EngineCrashed          500  the engine fails, or its process dies, on this request alone
   ├─ InvalidLogits          500  NaN where a token should have been sampled
   └─ EngineDead             503  a process of the group has died

Exceptions never cross a process: there they are `finish.FinishAbort` values. `server/errors.py` maps this tree to HTTP, once.
"""

from __future__ import annotations


class SternaError(Exception):
    """Root of the tree. `message` is safe to show to whoever caused it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StartupError(SternaError):
    """Raised before serving begins."""


class ConfigError(StartupError):
    """A flag or a combination of flags that can't be served."""


class ModelError(StartupError):
    """A model that can't be found, fetched, read or supported."""


class RequestError(SternaError):
    """The client's to mend.

    `param` names the field at fault (OpenAI's `error.param`), `code` is a stable identifier of the kind of fault.
    """

    status: int = 400
    code: str = "invalid_request"
    error_type: str = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A body, a field or a value that isn't what the API defines."""

    code = "invalid_value"


class UnsupportedField(InvalidRequest):
    """A field that the API defines and this server doesn't implement."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and wished-for output, longer than the model's context."""

    code = "context_length_exceeded"


class DuplicateRid(InvalidRequest):
    """A `rid` that is alive already."""

    code = "duplicate_rid"


class SessionFull(InvalidRequest):
    """More than this session was opened for: waiting doesn't help, a larger or a new session does."""

    code = "session_full"


class AuthenticationFailed(RequestError):
    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class RequestNotFound(RequestError):
    status = 404
    code = "not_found"


class SessionNotFound(RequestError):
    status = 404
    code = "session_not_found"


class SessionBusy(RequestError):
    status = 409
    code = "session_busy"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"
    allowed: tuple[str, ...] = ()
    """Methods that the route has."""


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class OverloadedError(SternaError):
    """Refused for load; the same request may succeed after `retry_after_s` seconds."""

    status: int = 503
    code: str = "overloaded"
    error_type: str = "overloaded_error"
    retry_after_s: int = 1

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class QueueFull(OverloadedError):
    status = 429
    code = "queue_full"


class TooManyQueuedTokens(OverloadedError):
    status = 429
    code = "too_many_queued_tokens"


class TooManyConcurrent(OverloadedError):
    status = 429
    code = "too_many_concurrent"


class WaitingTimeout(OverloadedError):
    code = "waiting_timeout"


class TooManySessions(OverloadedError):
    """Retried when others have closed or expired."""

    status = 429
    code = "too_many_sessions"


class NotReady(OverloadedError):
    code = "not_ready"


class Draining(OverloadedError):
    code = "draining"


class TimedOut(SternaError):
    """The time that the server or the client gave it is over."""

    status: int = 504
    code: str = "timeout"
    error_type: str = "timeout_error"


class RunningTimeout(TimedOut):
    code = "running_timeout"


class DeadlineExceeded(TimedOut):
    code = "deadline_exceeded"


class EngineError(SternaError):
    """Ours to mend. The client sees `message`, which says nothing of the inside; the log has the rest."""

    status: int = 500
    code: str = "internal_error"
    error_type: str = "server_error"


class EngineFailure(EngineError):
    code = "engine_failure"


class EngineCrashed(EngineError):
    code = "engine_crashed"


class InvalidLogits(EngineError):
    code = "invalid_logits"


class EngineDead(EngineError):
    status = 503
    code = "engine_dead"
