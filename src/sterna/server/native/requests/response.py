"""A flight recorder's `Record` as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sterna.protocol.control import LiveReq
from sterna.protocol.generate import SchedulerTimes
from sterna.server.native.requests.protocol import Process, RequestSummary, RequestTrace, StageEvent
from sterna.tokenizer_manager.flight_recorder import Record

# Stages that a request passes once, and where; their order is that of what has the same time.
STAGES: tuple[tuple[str, Process], ...] = (
    ("received", "server"),
    ("templated", "server"),
    ("tokenized", "server"),
    ("dispatched", "server"),
    ("first_token", "scheduler"),
    ("last_token", "scheduler"),
    ("detokenized", "detokenizer"),
    ("first_byte", "server"),
    ("reader_gone", "server"),
    ("finished", "server"),
)
MARKS = {"chunk": "prefill_chunk", "retracted": "retracted", "readmitted": "readmitted"}


def to_summary(record: Record) -> RequestSummary:
    return RequestSummary(**_summary(record))


def to_trace(record: Record, live: LiveReq | None) -> RequestTrace:
    """`live` is the scheduler's word of this moment, which the record's times have taken over."""
    fields = _summary(record)
    if live is not None:
        # Until a row of output has come, only the scheduler knows.
        fields["prompt_tokens"] = live.prompt_tokens
        fields["cached_tokens"] = live.cached_tokens
        fields["output_tokens"] = max(fields["output_tokens"], live.output_tokens)
    return RequestTrace(**fields, scheduler_state=None if live is None else live.state, events=_events(record))


def _summary(record: Record) -> dict[str, Any]:
    times = record.times
    now = time.monotonic()
    origin = record.origin
    return {
        "rid": record.rid,
        "serial": record.serial,
        "group": None if origin is None else origin.rid,
        "request_id": None if origin is None else origin.request_id,
        "route": None if origin is None else origin.route,
        "stream": None if origin is None else origin.stream,
        "state": record.phase,
        "outcome": record.outcome,
        "finish_reason": record.finish_reason,
        "stopped_by": record.stopped_by,
        "code": record.code,
        "abort_cause": record.abort_cause,
        "received": round(time.time() - (now - times.received), 3),
        "duration_ms": _ms((now if times.finished is None else times.finished) - times.received),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "max_new_tokens": record.max_new_tokens,
        "priority": record.priority,
        "chunks": sum(each.chunks for each in times.schedulers),
        "retractions": times.retractions,
        "replays": record.replays,
    }


def _events(record: Record) -> list[StageEvent]:
    received = record.times.received
    found = sorted(_moments(record), key=lambda moment: moment[0])  # stable: what has the same time keeps the order of stages
    return [
        StageEvent(at_ms=_ms(at - received), process=process, stage=stage, cause=cause, tokens=tokens)
        for at, process, stage, cause, tokens in found
    ]


Moment = tuple[float, Process, str, str | None, int | None]


def _moments(record: Record) -> Iterator[Moment]:
    times = record.times
    for stage, process in STAGES:
        if stage == "finished":
            yield from _notes(record)
        if stage == "first_token":
            yield from _scheduled(times.schedulers)
        at = getattr(times, stage)
        if at is not None:
            yield at, process, stage, None, None


def _scheduled(schedulers: list[SchedulerTimes]) -> Iterator[Moment]:
    """What each scheduler that had the request did with it before and beside its output."""
    for each in schedulers:
        yield each.received, "scheduler", "scheduler_received", None, None
        if each.first_scheduled is not None:
            yield each.first_scheduled, "scheduler", "first_scheduled", None, None
        for mark in each.marks:
            yield mark.at, "scheduler", MARKS[mark.kind], None, mark.tokens


def _notes(record: Record) -> Iterator[Moment]:
    for note in record.notes:
        yield note.at, "server", note.event, note.detail or None, note.tokens


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
