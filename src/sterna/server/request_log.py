"""One structured log line (JSON) per request, at level info. It holds counts and times; of prompts and outputs it holds nothing."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import msgspec

from sterna.protocol.finish import FinishAbort, openai_name
from sterna.server.errors import HttpError
from sterna.server.exchange import Exchange
from sterna.tokenizer_manager.manager import Outcome
from sterna.tokenizer_manager.req_state import ReqState

log = logging.getLogger("sterna.request")


class Origin(NamedTuple):
    """What the HTTP layer knows of a generating request and its journal doesn't."""

    route: str
    request_id: str
    user: str | None
    """The client's word for its end user."""
    stream: bool


class RequestLog:
    """An observer of the manager (`on_finish`)."""

    def __init__(self) -> None:
        self._origins: dict[str, Origin] = {}

    def begin(self, rid: str, origin: Origin) -> None:
        """Call before the manager hears of `rid`. A rid that is live already keeps its origin: the manager will refuse the second one."""
        self._origins.setdefault(rid, origin)

    def drop(self, rid: str, origin: Origin) -> bool:
        """It has not begun. Whether that was still to be said: what the manager had registered has been logged at its end."""
        if self._origins.get(rid) is not origin:
            return False
        del self._origins[rid]
        return True

    def finished(self, state: ReqState, outcome: Outcome) -> None:
        origin = self._origins.pop(state.rid, None)
        reason = state.finished_reason
        times = state.times
        start = times.received
        line: dict[str, Any] = {
            "rid": state.rid,
            "request_id": origin.request_id if origin else None,
            "route": origin.route if origin else None,
            "stream": origin.stream if origin else None,
            "outcome": outcome,
            "finish_reason": openai_name(reason) if reason is not None else None,
            "code": reason.code if isinstance(reason, FinishAbort) else None,
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens,
            "completion_tokens": len(state.output_ids),
            "retractions": state.retractions,
            "ms": {
                name: round((at - start) * 1000, 3)
                for name in STAGES
                if (at := getattr(times, name)) is not None
            },
        }  # fmt: skip
        if origin is not None and origin.user is not None:
            line["user"] = origin.user
        log.info("%s", msgspec.json.encode(line).decode())

    def refused(self, exchange: Exchange, error: HttpError) -> None:
        """A request that ended before the manager had registered it."""
        line = {
            "request_id": exchange.request_id,
            "route": exchange.route,
            "outcome": "refused",
            "status": error.status,
            "code": error.code,
        }
        log.info("%s", msgspec.json.encode(line).decode())


# Milliseconds after `received`, in the order in which a request reaches them.
STAGES = ("templated", "tokenized", "dispatched", "first_scheduled", "first_token", "first_byte", "last_token", "detokenized", "finished")
