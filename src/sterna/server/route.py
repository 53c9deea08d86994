"""What a row of the route table says."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange

Handler = Callable[[Exchange, AppContext], Awaitable[None]]

PATH_PARAM = re.compile(r"{(\w+)(:path)?}")


class Route(NamedTuple):
    method: str
    path: str
    """`{name}` is one segment, `{name:path}` the rest."""
    handler: Handler
    summary: str
    request: Any = None
    """Type of the JSON body; None where there is none."""
    response: Any = None
    """Type of the JSON answer; None where it is something else."""
    streams: bool = False
    """Whether it may answer with server-sent events, and counts as a request in the log."""
    admin: bool = False
    """Whether it concerns everybody's requests: `--admin-api-key`."""


def compile_path(path: str) -> re.Pattern[str]:
    """For `fullmatch` against a request's path; its groups are the path's parameters."""
    pattern = ""
    end = 0
    for param in PATH_PARAM.finditer(path):
        pattern += re.escape(path[end : param.start()]) + f"(?P<{param[1]}>{'.*' if param[2] else '[^/]+'})"
        end = param.end()
    return re.compile(pattern + re.escape(path[end:]))
