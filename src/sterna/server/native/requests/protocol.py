"""The answers of GET /v1/requests and GET /v1/requests/{rid}, and what may be asked of the list.

Names, counts and times. A client's `rid` and `x-request-id` are shown; its prompt, output, stop strings, `user` and key are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from sterna.errors import InvalidRequest
from sterna.tokenizer_manager.flight_recorder import Phase
from sterna.tokenizer_manager.req_state import Outcome

Process = Literal["server", "scheduler", "detokenizer"]
SchedulerState = Literal["waiting", "prefill", "running"]

MAX_LIMIT = 1000
DEFAULT_LIMIT = 50


class StageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition."""

    at_ms: float
    """After the request's arrival."""
    process: Process
    """Where it happened."""
    stage: str
    """received, templated, tokenized, dispatched, scheduler_received, first_scheduled, prefill_chunk, retracted, readmitted, first_token,
    last_token, detokenized, first_byte, reader_gone, finished; aborted, timeout, replayed."""
    cause: str | None = None
    """Of an abort, a timeout, a replay."""
    tokens: int | None = None
    """Tokens whose KV is there, for what the scheduler did; output tokens that were kept, for a replay."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A request, without its stages."""

    rid: str
    serial: int
    """Order of arrival since the server's start, from 1."""
    group: str | None
    """The client's name for the HTTP request; another than `rid` for a member of a list."""
    request_id: str | None
    """`X-Request-Id`."""
    route: str | None
    stream: bool | None
    state: Phase
    outcome: Outcome | None
    """Once it has ended."""
    finish_reason: str | None
    stopped_by: Literal["token", "string"] | None
    code: str | None
    """Of the error that it ended with."""
    abort_cause: str | None
    received: float
    """Seconds since 1970."""
    duration_ms: float
    """From its arrival to its end, or to now."""
    prompt_tokens: int
    """0 until it is tokenized."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    output_tokens: int
    """That the server has; of a request that isn't streamed they come many at a time."""
    max_new_tokens: int | None
    priority: int
    chunks: int
    """Prefill chunks computed, that the server knows of."""
    retractions: int
    """That the server knows of."""
    replays: int


class RequestTrace(RequestSummary, frozen=True, kw_only=True):
    scheduler_state: SchedulerState | None
    """What the scheduler said a moment ago; None where it has nothing of it any more or yet, or didn't answer in time."""
    events: list[StageEvent]
    """In order of time. A request's repeated events are bounded: of many, the first and the latest are kept."""


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[RequestSummary]
    """Newest first."""
    next_before: int | None
    """`before` of the next page; None on the last."""


class RequestTraces(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    """As asked for."""
    total: int
    """Requests that run, or ran, under that name: more than one for a list of prompts."""
    requests: list[RequestTrace]
    """The first of them, in order."""


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query string of GET /v1/requests."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    before: Annotated[int, Meta(ge=1, le=1 << 62)] | None = None
    """Only those of a smaller `serial`."""
    state: Phase | Literal["live"] | None = None
    """One state, or `live`: all but finished."""
    outcome: Outcome | None = None
    rid: str | None = None
    """Exactly this rid, or the name of the list that it is a member of."""
    request_id: str | None = None


QUERY_FIELDS = ListQuery.__struct_fields__
STATES = ("live", *get_args(Phase))


def decode_query(query: bytes) -> ListQuery:
    """Raises InvalidRequest that names the field."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16, errors="strict")
    except ValueError:
        raise InvalidRequest("the query string can't be read", code="invalid_query") from None
    given: Mapping[str, str] = dict(pairs)
    for name in given:
        if name not in QUERY_FIELDS:
            raise InvalidRequest(f"no query parameter {name[:64]!r}; there are {', '.join(QUERY_FIELDS)}", param=name[:64])
    if len(given) != len(pairs):
        raise InvalidRequest("a query parameter is given twice")
    try:
        return msgspec.convert(dict(given), ListQuery, strict=False)
    except msgspec.ValidationError as fault:
        what, _, where = str(fault).partition(" - at `$.")
        field = where.rstrip("`") or None
        raise InvalidRequest(f"{field}: {what}" if field else what, param=field) from None
