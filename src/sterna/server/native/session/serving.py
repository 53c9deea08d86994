"""POST /open_session, POST /close_session."""

from __future__ import annotations

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.native.session.protocol import CloseSessionResponse, decode_close, decode_open


async def open_session(exchange: Exchange, context: AppContext) -> None:
    """Answers with the session's id, a bare JSON string as SGLang's. Raises InvalidRequest, TooManySessions."""
    request = decode_open(await exchange.body(), context.unknown_fields)
    capacity = request.capacity if request.capacity is not None else request.capacity_of_str_len
    await exchange.respond_json(context.manager.sessions.open(request.session_id, capacity, request.timeout))


async def close_session(exchange: Exchange, context: AppContext) -> None:
    """Raises SessionNotFound."""
    request = decode_close(await exchange.body(), context.unknown_fields)
    context.manager.sessions.close(request.session_id)
    await exchange.respond_json(CloseSessionResponse(request.session_id))
