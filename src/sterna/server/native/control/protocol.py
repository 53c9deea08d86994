"""Bodies and answers of what steers the server: /abort_request, /flush_cache, /server_info."""

from __future__ import annotations

from typing import Any

import msgspec

from sterna.errors import InvalidRequest
from sterna.server.body import BodyDecoder, UnknownFields


class AbortRequest(msgspec.Struct, kw_only=True):
    rid: str | None = None
    """A request's rid, exactly; where none has it, the name of a list of prompts, or the X-Request-Id that requests were sent with."""
    abort_all: bool | None = None


class AbortResponse(msgspec.Struct, frozen=True):
    aborted: int
    """Requests that were told to end; 0 where none of that name was running any more."""


class FlushCacheResponse(msgspec.Struct, frozen=True):
    flushed_tokens: int


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    served_model_name: str
    model: dict[str, Any]
    """Facts of the model: family, parameters, vocabulary, context."""
    server_args: dict[str, Any]
    """Every setting but the keys."""
    processes: dict[str, dict[str, str | int | float | bool]]
    """What each child said when it was ready: engine, dtype, KV slots, promises of exactness."""
    scheduler: dict[str, int] | None
    """The scheduler's latest gauges."""


_abort = BodyDecoder(AbortRequest, unbuilt={"abort_message": ()})


def decode_abort(body: bytes, unknown: UnknownFields) -> AbortRequest:
    """Raises InvalidRequest."""
    request, _ = _abort.decode(body, unknown)
    if request.rid is None and not request.abort_all:
        raise InvalidRequest("rid: name a request, or set abort_all", param="rid")
    return request
