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
    """`ok`, `starting`, `recovering`, `draining`, `stalled` or `dead`."""


async def health(exchange: Exchange, context: AppContext) -> None:
    """200 while work that there is goes on; during loading, recovery and draining too. An answer says that the server's loop runs.

    503 `dead` after a death that nothing follows, `stalled` after `SILENCE_S` without a word about work that was dispatched, or from a
    process that is being started again.
    """
    manager = context.manager
    since = manager.silent_since()
    status = "dead" if not manager.alive else "stalled" if since is not None and time.monotonic() - since > SILENCE_S else "ok"
    await exchange.respond_json(Health(status), 200 if status == "ok" else 503)


async def ready(exchange: Exchange, context: AppContext) -> None:
    """200 when a request would be admitted, and not wait for an engine that is being restarted. The engine has run once then."""
    manager = context.manager
    if manager.ready:
        await exchange.respond_json(Health("ok"))
        return
    status = "starting"
    if not manager.alive:
        status = "dead"
    elif manager.draining:
        status = "draining"
    elif manager.ready_event.is_set():
        status = "recovering"
    await exchange.respond(503, msgspec.json.encode(Health(status)), headers=[(b"retry-after", b"1")])


async def metrics(exchange: Exchange, context: AppContext) -> None:
    await exchange.respond(200, context.metrics.render(), content_type=CONTENT_TYPE)
