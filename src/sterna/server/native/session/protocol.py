"""Bodies and answers of /open_session and /close_session, under SGLang's names."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sterna.errors import InvalidRequest
from sterna.server.body import BodyDecoder, UnknownFields
from sterna.server.fields import SessionId
from sterna.server.sampling import MAX_COUNT

Capacity = Annotated[int, Meta(ge=1, le=MAX_COUNT)]


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    session_id: SessionId | None = None
    """The session's name (default: a new one)."""
    capacity: Capacity | None = None
    """Tokens that all its turns together may hold (default: sixteen contexts of the model)."""
    capacity_of_str_len: Capacity | None = None
    """SGLang's name for it, where it counts characters. Read as tokens, which is no less: a token stands for one or several."""
    timeout: Annotated[float, Meta(gt=0, le=604_800)] | None = None
    """Idle seconds after which it is forgotten (default: `--session-timeout`)."""


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    session_id: SessionId


class CloseSessionResponse(msgspec.Struct, frozen=True):
    session_id: str


_open = BodyDecoder(OpenSessionRequest, unbuilt={"streaming": (False,)})
_close = BodyDecoder(CloseSessionRequest, unbuilt={})


def decode_open(body: bytes, unknown: UnknownFields) -> OpenSessionRequest:
    """No body is one without fields. Raises InvalidRequest."""
    request, _ = _open.decode(body or b"{}", unknown)
    if None not in (request.capacity, request.capacity_of_str_len) and request.capacity != request.capacity_of_str_len:
        raise InvalidRequest("capacity and capacity_of_str_len differ; send one of them", param="capacity")
    return request


def decode_close(body: bytes, unknown: UnknownFields) -> CloseSessionRequest:
    """Raises InvalidRequest."""
    request, _ = _close.decode(body, unknown)
    return request
