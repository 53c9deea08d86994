"""The journal of one request: `ReqState`, append-only, and `JournalReader`, which reads it by cursor.

    registered ── dispatch ──> dispatched ── rows folded ──> receiving ── terminal row ──> finished ── reader closed ──> removed
        │                          │                             │
        │ failure, abort:  ^       └─────────────────────────────┼── reader closed, output lost: AbortReq, once;
        └ dropped here     │                                     │   kept until the terminal row
          and now          └──── recalled, to be sent again ─────┴── the engine has died (`recovery.py`)

Streaming, full responses and replay are readers of the same journal. `dispatched` is true iff the scheduler may hold something
for the rid (invariant 5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import SchedulerTimes, TokenizedGenerateReqInput
from sterna.protocol.logprobs import TokenLogprobs
from sterna.tokenizer_manager.admission import Admission
from sterna.tokenizer_manager.session import Turn

AbortCause = Literal[
    "client_gone", "abort_request", "replaced", "request_failed", "timeout", "evicted", "shutdown", "output_lost", "decode_refused"
]
"""Why a request was told to end before its time.

`replaced`: by another turn of its session. `request_failed`: another part of the same HTTP request did, or its answer could not be
written. `evicted`: its place was given to one of a higher priority. `output_lost`, `decode_refused`: a fault between the processes, or in
the detokenizer.
"""


Outcome = Literal["ok", "error", "abort"]


class Origin(NamedTuple):
    """What the HTTP layer knows of a generating request; the members of a fan-out share one."""

    route: str
    request_id: str
    rid: str
    """The client's name for the whole HTTP request."""
    user: str | None
    """The client's word for its end user."""
    stream: bool


MAX_SCHEDULERS = 4
"""Whose words are kept of one request: the first ones', and the latest's."""


@dataclass(slots=True, eq=False)
class RequestTimes:
    """When each stage was reached, in seconds of CLOCK_MONOTONIC; None for one that wasn't."""

    received: float
    templated: float | None = None
    tokenized: float | None = None
    dispatched: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    detokenized: float | None = None
    first_byte: float | None = None
    finished: float | None = None
    reader_gone: float | None = None
    """Where the consumer left before the end."""
    schedulers: list[SchedulerTimes] = field(default_factory=list)
    """The latest word of each scheduler that had the request: more than one where it was replayed."""

    def take(self, scheduler: SchedulerTimes) -> None:
        """Adopt what the scheduler saw. What happens once has happened once: a replay moves no first time."""
        if self.schedulers and self.schedulers[-1].received == scheduler.received:
            self.schedulers[-1] = scheduler
        else:
            if len(self.schedulers) == MAX_SCHEDULERS:
                del self.schedulers[-1]
            self.schedulers.append(scheduler)
        if self.first_scheduled is None:
            self.first_scheduled = scheduler.first_scheduled
        if self.first_token is None:
            self.first_token = scheduler.first_token
        self.last_token = scheduler.last_token

    @property
    def retractions(self) -> int:
        return sum(each.retractions for each in self.schedulers)


@dataclass(slots=True, eq=False)
class ReqState:
    """Owned by the server's event loop; nobody else writes it."""

    rid: str
    times: RequestTimes
    epoch: int
    """Of the scheduler that its next row must come from."""
    admission: Admission
    """Its place among the live requests; given back when it is removed."""
    origin: Origin | None = None
    """None where no HTTP request stands behind it."""
    turn: Turn | None = None
    """Its place in a session."""
    tokenized: TokenizedGenerateReqInput | None = None
    """None until hop 3 is through."""
    dispatched: bool = False
    abort_sent: bool = False
    awaits_terminal: bool = False
    """The scheduler still owes its terminal row. Until it comes the rid stays taken, even where the journal has ended without it."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token of `output_ids`, where the request asked for them."""
    text_chunks: list[str] = field(default_factory=list)
    """One per accepted row, in order; many are empty."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished_reason: FinishReason | None = None
    replays: int = 0
    """Times that it was in flight when the engine died."""
    strikes: int = 0
    """Of those, the latest: of one process, `struck_by`, without progress in between (`trials.py`)."""
    struck_by: str = ""
    tokens_at_strike: int = 0
    """Output that it had at the first of them."""
    last_row_time: float | None = None
    event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.tokenized is not None and self.tokenized.sampling_params.return_logprob

    def text(self) -> str:
        """The whole output text so far. Joined on demand: accumulating it would copy it at every token."""
        return "".join(self.text_chunks)


@dataclass(slots=True, frozen=True)
class OutputDelta:
    """What a journal gained since its reader looked last."""

    text: str
    output_ids: list[int]
    finished_reason: FinishReason | None
    """Set on the last delta only."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token of `output_ids`, where the request asked for them."""


class JournalReader:
    """One consumer's view of a `ReqState`. Whoever gets one must `close` it on every path."""

    __slots__ = ("_chunk", "_closed", "_on_close", "_state", "_token", "completion_tokens")

    def __init__(self, state: ReqState, on_close: Callable[[ReqState, AbortCause], None]) -> None:
        self._state = state
        self._on_close = on_close
        self._chunk = 0
        self._token = 0
        self._closed = False
        self.completion_tokens = 0
        """Output tokens up to and with the last delta."""

    @property
    def rid(self) -> str:
        return self._state.rid

    @property
    def prompt_tokens(self) -> int:
        return self._state.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._state.cached_tokens

    @property
    def times(self) -> RequestTimes:
        return self._state.times

    async def next_delta(self) -> OutputDelta:
        """Wait until the journal holds something beyond the cursor, and take all of it.

        After the delta that carries `finished_reason` there is none: a further call raises RuntimeError.
        """
        state = self._state
        while self._chunk == len(state.text_chunks):
            if state.finished and self._chunk:
                raise RuntimeError(f"{state.rid}: read past its end")
            state.event.clear()
            await state.event.wait()
        return self._take()

    def _take(self) -> OutputDelta:
        state = self._state
        chunks = state.text_chunks
        text = chunks[self._chunk] if len(chunks) == self._chunk + 1 else "".join(chunks[self._chunk :])
        ids = state.output_ids[self._token :]
        logprobs = state.logprobs[self._token :]
        self._chunk = len(chunks)
        self._token = self.completion_tokens = len(state.output_ids)
        return OutputDelta(text, ids, state.finished_reason, logprobs)

    def mark_first_byte(self) -> None:
        """The first byte that carries output has been handed to the socket."""
        if self._state.times.first_byte is None:
            self._state.times.first_byte = time.monotonic()

    def close(self, cause: AbortCause = "request_failed") -> None:
        """The consumer is done or gone. A request that hasn't finished is aborted, for `cause`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close(self._state, cause)


def outcome_of(state: ReqState) -> Outcome:
    """How `state`, which has ended, is counted."""
    reason = state.finished_reason
    if not isinstance(reason, FinishAbort):
        return "ok"
    return "abort" if aborted(reason) else "error"


def aborted(reason: FinishReason) -> bool:
    """Whether `reason` is the client's own doing: it left, or asked for the end."""
    return isinstance(reason, FinishAbort) and reason.code == "aborted"
