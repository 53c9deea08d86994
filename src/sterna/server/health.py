"""GET /health (does the server live?), GET /ready (should it get work?), GET /metrics. None of them queues behind work."""

from __future__ import annotations

import time

import msgspec

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.metrics import CONTENT_TYPE

SILENCE_S = 300.0
"""The engine is ill when it has owed answers and said nothing at all for longer. It speaks after every step, of its output or of its
counters: what has to fit is one step, not a whole prefill."""


class Health(msgspec.Struct, frozen=True):
    status: str
    """`ok`, `starting`, `draining`, `stalled` or `dead`."""


async def health(exchange: Exchange, context: AppContext) -> None:
    """200 while every process of the group lives and work that there is goes on; during loading and draining too.

    503 `dead` after a process's death, `stalled` after `SILENCE_S` without a word about work that was dispatched.
    """
    manager = context.manager
    since = manager.silent_since()
    status = "dead" if not manager.alive else "stalled" if since is not None and time.monotonic() - since > SILENCE_S else "ok"
    await exchange.respond_json(Health(status), 200 if status == "ok" else 503)


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
