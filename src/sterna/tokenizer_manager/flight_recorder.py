"""The flight recorder: what became of each request, and when. For `GET /v1/requests`, `sterna trace` and the causes in `/metrics`.

    begin ──> live record ── note: aborted, timeout, replayed ──> finished ──> ring of the last N ──> overwritten

A record holds names, counts and times: no prompt, no output, no token, no key, no message. It is written at transitions only, never per
token; the stages themselves are the journal's `RequestTimes`, which the record shares.

Bounds. Live records are as many as live requests, ended ones `--flight-recorder` at most; each has `MAX_NOTES` notes, and what
`MAX_SCHEDULERS` schedulers said, `MAX_MARKS` marks each. That is about 1.5 KB for a usual record, 18 KB for the largest that there can be.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from sterna.protocol.control import PROCESSES, EndCause, ProcessName
from sterna.protocol.finish import FinishAbort, FinishMatchedStr, FinishMatchedToken, openai_name
from sterna.tokenizer_manager.req_state import AbortCause, Origin, Outcome, ReqState, RequestTimes

Event = Literal["aborted", "timeout", "replayed"]
Phase = Literal["tokenizing", "queued", "running", "finishing", "finished"]
CAUSES: dict[Event, tuple[str, ...]] = {
    "aborted": (*get_args(AbortCause), "other"),
    "timeout": ("waiting_timeout", "running_timeout", "deadline_exceeded", "other"),
    "replayed": ("scheduler_died", "detokenizer_died", "other"),
}
"""What is counted apart; any other detail counts as `other`."""
MAX_NOTES = 16
"""Of one record; of more, the first half and the latest."""
MAX_CODES = 64
"""Error codes counted apart. They are constants of the source, never a client's words; one more would count as `other`."""
MAX_DETAIL = 64
"""Characters of a note's detail."""


class Note(NamedTuple):
    """A transition that the journal has no place for."""

    at: float
    event: Event
    detail: str
    """Its cause."""
    tokens: int | None
    """Output tokens that it is about."""


@dataclass(slots=True, eq=False)
class Record:
    """One request. Its counts are those of the last `refresh`."""

    serial: int
    """Order of registration, from 1."""
    rid: str
    origin: Origin | None
    times: RequestTimes
    state: ReqState | None
    """While it lives."""
    notes: list[Note] = field(default_factory=list)
    replays: int = 0
    abort_cause: str | None = None
    phase: Phase = "tokenizing"
    outcome: Outcome | None = None
    """Once it has ended."""
    finish_reason: str | None = None
    """OpenAI's word."""
    stopped_by: Literal["token", "string"] | None = None
    code: str | None = None
    """Of the error that it ended with."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    max_new_tokens: int | None = None
    priority: int = 0

    def refresh(self) -> Record:
        """Take over what the journal says now."""
        state = self.state
        if state is None:
            return self
        self.prompt_tokens = state.prompt_tokens
        self.cached_tokens = state.cached_tokens
        self.output_tokens = len(state.output_ids)
        if state.tokenized is not None:
            self.max_new_tokens = state.tokenized.sampling_params.max_new_tokens
            self.priority = state.tokenized.priority
        reason = state.finished_reason
        if reason is not None:
            self.finish_reason = openai_name(reason)
            if isinstance(reason, FinishMatchedToken | FinishMatchedStr):
                self.stopped_by = "token" if isinstance(reason, FinishMatchedToken) else "string"
            self.code = reason.code if isinstance(reason, FinishAbort) else None
        self.phase = _phase(state)
        return self

    def add(self, note: Note) -> None:
        if len(self.notes) == MAX_NOTES:
            del self.notes[MAX_NOTES // 2]
        self.notes.append(note)


def _phase(state: ReqState) -> Phase:
    if state.finished:
        return "finishing"
    if state.output_ids:
        return "running"
    return "queued" if state.tokenized is not None else "tokenizing"  # dispatched, or held until the engine is back


class FlightRecorder:
    """Owned by the server's event loop. Nothing here raises for a rid that it doesn't know: a note may come late."""

    def __init__(self, keep: int) -> None:
        """`keep`: ended requests that are remembered."""
        self._live: dict[str, Record] = {}
        self._ended: deque[Record] = deque(maxlen=keep)
        self._serials = itertools.count(1)
        self.counts: dict[tuple[Event, str], int] = {(event, cause): 0 for event, causes in CAUSES.items() for cause in causes}
        """Since the start, by event and cause."""
        self.restarts: dict[tuple[str, str], int] = {(process, cause): 0 for process in PROCESSES for cause in get_args(EndCause)}
        """Since the start, by process and cause."""
        self.errors: dict[str, int] = {}
        """Requests that ended with an error, by its code."""
        self.refusals: dict[str, int] = {}
        """HTTP requests that were refused before they were registered, by the refusal's code."""

    # ---- writing ----

    def begin(self, state: ReqState) -> None:
        """`state` is registered."""
        self._live[state.rid] = Record(next(self._serials), state.rid, state.origin, state.times, state)

    def note(self, rid: str, event: Event, detail: str = "", tokens: int | None = None) -> None:
        """`event` happens to `rid` now, because of `detail`: one of `CAUSES[event]`, never anything of a prompt or an output.

        A request is aborted once: the first cause counts, and none after its end.
        """
        record = self._live.get(rid)
        if record is not None:
            if event == "aborted":
                if record.abort_cause is not None or record.state is None or record.state.finished:
                    return
                record.abort_cause = detail[:MAX_DETAIL]
            record.replays += event == "replayed"
            record.add(Note(time.monotonic(), event, detail[:MAX_DETAIL], tokens))
        self.counts[event, detail if detail in CAUSES[event] else "other"] += 1

    def restarted(self, process: ProcessName, cause: EndCause) -> None:
        """`process` has been started again because it ended by `cause`."""
        self.restarts[process, cause] += 1

    def refused(self, code: str) -> None:
        """An HTTP request that wanted output got an error with `code` instead, before anything of it was registered."""
        _tally(self.refusals, code)

    def finished(self, state: ReqState, outcome: Outcome) -> None:
        """An observer of the manager (`on_finish`)."""
        record = self._live.pop(state.rid, None)
        if record is None:
            return
        record.refresh()
        record.state = None
        record.phase = "finished"
        record.outcome = outcome
        if outcome == "error" and record.code is not None:
            _tally(self.errors, record.code)
        self._ended.append(record)

    # ---- reading ----

    def find(self, rid: str) -> list[Record]:
        """What a client means by `rid`: the newest request of that name, or the members of a fan-out so named, in their order; or nothing.

        Looks at every record that there is, unless a request of that name lives.
        """
        record = self._live.get(rid)
        if record is None:
            named = (each for each in self._all() if each.rid == rid or (each.origin is not None and each.origin.rid == rid))
            record = max(named, key=lambda each: each.serial, default=None)
        if record is None:
            return []
        if record.rid == rid:
            return [record.refresh()]
        members = [each.refresh() for each in self._all() if each.origin is record.origin]
        return sorted(members, key=lambda each: each.serial)

    def newest(self, matches: Callable[[Record], bool], *, limit: int, before: int | None) -> list[Record]:
        """The newest `limit` that match, newest first; with `before`, of those registered before that serial."""
        found = (record.refresh() for record in self._all() if before is None or record.serial < before)
        return heapq.nlargest(limit, filter(matches, found), key=lambda record: record.serial)

    def _all(self) -> itertools.chain[Record]:
        return itertools.chain(self._live.values(), self._ended)


def _tally(counts: dict[str, int], code: str) -> None:
    if code not in counts and len(counts) >= MAX_CODES:
        code = "other"
    counts[code] = counts.get(code, 0) + 1
