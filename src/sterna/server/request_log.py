"""One structured log line (JSON) per request, at level info. It holds counts and times; of prompts and outputs it holds nothing."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from sterna.protocol.finish import FinishAbort, openai_name
from sterna.server.errors import HttpError
from sterna.server.exchange import Exchange
from sterna.tokenizer_manager.req_state import Outcome, ReqState

log = logging.getLogger("sterna.request")


class RequestLog:
    """A line for whatever ends, the manager's requests and those that never became one."""

    def finished(self, state: ReqState, outcome: Outcome) -> None:
        """An observer of the manager (`on_finish`)."""
        origin = state.origin
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
            "retractions": times.retractions,
            "replays": state.replays,
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
