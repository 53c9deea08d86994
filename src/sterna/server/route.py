"""What a row of the route table says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange

Handler = Callable[[Exchange, AppContext], Awaitable[None]]


class Route(NamedTuple):
    method: str
    path: str
    """As Starlette writes it: `{name}` is one segment, `{name:path}` the rest."""
    handler: Handler
    summary: str
    request: Any = None
    """Type of the JSON body; None where there is none."""
    response: Any = None
    """Type of the JSON answer; None where it is something else."""
    streams: bool = False
    """Whether it may answer with server-sent events, and counts as a request in the log."""
