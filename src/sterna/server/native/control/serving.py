"""POST /abort_request, POST /flush_cache, GET /server_info."""

from __future__ import annotations

import msgspec

import sterna
from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.native.control.protocol import AbortResponse, FlushCacheResponse, ServerInfo, decode_abort


async def abort_request(exchange: Exchange, context: AppContext) -> None:
    """A rid that isn't live is no error: whoever aborts races the request's own end. All requests are for the admin's key to end."""
    request = decode_abort(await exchange.body(), context.unknown_fields)
    if request.abort_all:
        context.auth.check_admin(exchange.scope["headers"])
        aborted = context.manager.abort_all()
    else:
        assert request.rid is not None
        aborted = context.manager.abort_request(request.rid)
    await exchange.respond_json(AbortResponse(aborted))


async def flush_cache(exchange: Exchange, context: AppContext) -> None:
    """Prefixes that no live request holds are dropped. Raises EngineDead."""
    async with exchange.until_gone():
        await exchange.respond_json(FlushCacheResponse(await context.manager.flush_cache()))


async def server_info(exchange: Exchange, context: AppContext) -> None:
    manager = context.manager
    args = msgspec.to_builtins(context.args)
    del args["api_key"], args["admin_api_key"]
    stats = manager.stats
    await exchange.respond_json(
        ServerInfo(
            version=sterna.__version__,
            served_model_name=manager.served_model_name,
            model=msgspec.to_builtins(manager.model),
            server_args=args,
            processes=manager.process_info,
            scheduler=None if stats is None else {name: getattr(stats, name) for name in stats.__struct_fields__},
        )
    )
