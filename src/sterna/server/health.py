"""GET /health (does the server live?), GET /ready (should it get work?), GET /metrics. None of them queues behind work."""

from __future__ import annotations

import msgspec

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.metrics import CONTENT_TYPE


class Health(msgspec.Struct, frozen=True):
    status: str
    """`ok`, `starting`, `draining` or `dead`."""


async def health(exchange: Exchange, context: AppContext) -> None:
    """200 while every process of the group lives, during loading and draining too."""
    alive = context.manager.alive
    await exchange.respond_json(Health("ok" if alive else "dead"), 200 if alive else 503)


async def ready(exchange: Exchange, context: AppContext) -> None:
    """200 when a request would be admitted."""
    manager = context.manager
    if manager.ready:
        await exchange.respond_json(Health("ok"))
        return
    status = "dead" if not manager.alive else "draining" if manager.draining else "starting"
    await exchange.respond(503, msgspec.json.encode(Health(status)), headers=[(b"retry-after", b"1")])


async def metrics(exchange: Exchange, context: AppContext) -> None:
    await exchange.respond(200, context.metrics.render(), content_type=CONTENT_TYPE)
