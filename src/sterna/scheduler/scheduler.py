"""The scheduler's event loop: receive, admit, choose, submit, take, publish.

Everything happens in this one thread. The step that a turn submits runs while the one before it is read and the next turn begins
(`flight.py`); where memory is short it is taken from nobody before the step in flight has been read. A fault in one request's handling
ends that request; the rows of a step that fails are run again one by one (`step.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, assert_never

import numpy as np

from sterna.executor.base import Executor
from sterna.ipc.channel import ChannelError
from sterna.protocol.channels import ToScheduler, ToServer
from sterna.protocol.control import (
    FlushCacheOutput,
    FlushCacheReq,
    LookUpOutput,
    LookUpReq,
    NewDetokenizerReq,
    OutputCredit,
    SchedulingStarted,
    ShutdownReq,
)
from sterna.protocol.finish import ABORTED, FAULT, QUEUE_FULL, SHUTTING_DOWN, FinishReason
from sterna.protocol.generate import (
    AbortReq,
    BatchTokenIDOutput,
    BatchTokenizedGenerateReqInput,
    SchedulerMark,
    TokenIDRow,
    TokenizedGenerateReqInput,
)
from sterna.scheduler.batch import ScheduleBatch
from sterna.scheduler.decode import Decodes, RunningBatch, choose_victim
from sterna.scheduler.finish import DOES_NOT_FIT, SUSPECT
from sterna.scheduler.intake import IntakeLimits, Refusal, to_req
from sterna.scheduler.invariants import InvariantViolation, check_counts, check_ownership
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.output import live_req, mark_sent, refusal_row, to_token_id_output
from sterna.scheduler.prefill import Prefill
from sterna.scheduler.req import Req, ReqState
from sterna.scheduler.results import StepResult
from sterna.scheduler.stats import StatsKeeper
from sterna.scheduler.step import StepRunner
from sterna.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_BATCHES_IN_FLIGHT = 32
"""Output batches that the server hasn't folded yet."""
RECEIVE_LIMIT = 256
"""Messages taken in between two steps."""


MAX_FAILED_TURNS = 16


class Inbox(Protocol):
    def wait(self, timeout_ms: int | None = None) -> bool: ...
    def drain(self, limit: int = ...) -> Iterator[ToScheduler]: ...


class Outbox(Protocol):
    def to_detokenizer(self, message: BatchTokenIDOutput) -> None: ...
    def replace_detokenizer(self, address: str) -> None: ...
    def to_server(self, address: str | None, message: ToServer) -> None:
        """`address` None is the server that started us."""


class Scheduler:
    """Built by `process.py`, or by a test with an inbox and an outbox of its own."""

    def __init__(
        self,
        *,
        executor: Executor,
        ledger: KVLedger,
        prefill: Prefill,
        running: RunningBatch,
        runner: StepRunner,
        limits: IntakeLimits,
        max_queued_requests: int,
        inbox: Inbox,
        outbox: Outbox,
        tokenizer: Callable[[], Tokenizer],
        epoch: int,
        check_every_slot: bool = False,
    ) -> None:
        self.executor = executor
        self.ledger = ledger
        self.prefill = prefill
        self.running = running
        self.stats = StatsKeeper(epoch, ledger.pools.total)
        self.reqs: dict[str, Req] = {}
        """Everyone alive."""
        self.credits = MAX_BATCHES_IN_FLIGHT
        self.stopping = False
        self._runner = runner
        self._in_flight = runner.in_flight
        self._limits = limits
        self._max_queued_requests = max_queued_requests
        self._inbox = inbox
        self._outbox = outbox
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._check_every_slot = check_every_slot
        self._serial = 0
        self._due: dict[Req, None] = {}
        """Who has output, or an ending, to publish; each once."""
        self._refusals: list[TokenIDRow] = []
        self._books_balance = True
        self._failed_turns = 0
        """In a row."""

    # ---- the loop ----

    def main_loop(self) -> None:
        """Until a `ShutdownReq`."""
        while not self.stopping:
            self.turn()
        self.shutdown()

    def turn(self) -> None:
        """Receive, and one step. A fault that no request's own barrier stopped ends those that were in the step, and the loop goes on.

        Raises what comes out of many turns in a row: then it is none of the requests' fault, and the process must end.
        """
        try:
            self.receive(block=not self.can_step and not self._in_flight)
            self.step()
            self._failed_turns = 0
        except InvariantViolation:
            raise  # in tests only: `_check_books`
        except Exception:
            self._failed_turns += 1
            if self._failed_turns >= MAX_FAILED_TURNS:
                raise
            log.exception("a turn of the scheduler failed")
            self._end([(req, FAULT) for req in (*self.running.reqs, *self.prefill.active)])

    def step(self) -> None:
        """One turn of the loop, without waiting for a message."""
        batch = None
        if self.can_step:
            self.admit()
            batch = self.choose()
        self.take(leave=0 if batch is None else self.submit(batch))
        self.publish()

    @property
    def can_step(self) -> bool:
        return bool(self.reqs) and self.credits > 0

    @property
    def is_idle(self) -> bool:
        """Nobody is alive, and nothing is held for anybody."""
        return not self.reqs and not self._in_flight

    # ---- receive ----

    def receive(self, *, block: bool = False) -> None:
        """Take in what has arrived; with `block`, sleep until something has."""
        if block:
            self._inbox.wait()
        try:
            for message in self._inbox.drain(RECEIVE_LIMIT):
                try:
                    self._handle(message)
                except Exception:
                    log.exception("a message could not be handled: %.200r", type(message).__name__)
        except ChannelError:
            log.exception("a message was dropped")

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self._take(message)
            case BatchTokenizedGenerateReqInput():
                for each in message.reqs:
                    self._take(each)
            case AbortReq():
                req = self.reqs.get(message.rid)
                if req is not None:
                    self._end([(req, message.reason)])
            case FlushCacheReq():
                flushed = self.ledger.cache.flush()
                self._outbox.to_server(message.reply_to, FlushCacheOutput(control_id=message.control_id, flushed_tokens=flushed))
            case LookUpReq():
                found = [live_req(req) for rid in message.rids if (req := self.reqs.get(rid)) is not None]
                self._outbox.to_server(message.reply_to, LookUpOutput(control_id=message.control_id, reqs=found))
            case OutputCredit():
                self.credits = min(self.credits + message.batches, MAX_BATCHES_IN_FLIGHT)
            case NewDetokenizerReq():
                self._begin_epoch(message)
            case ShutdownReq():
                self.stopping = True
            case _:
                assert_never(message)

    def _take(self, obj: TokenizedGenerateReqInput) -> None:
        """A new request: into the queue, or refused with its one terminal row."""
        received = time.monotonic()
        if obj.rid in self.reqs:
            # Its terminal row would end the living one. The server refuses duplicates before they get here.
            log.error("%s: a second request under a live rid was dropped", obj.rid)
            return
        try:
            # Rows that are still free count too: of a burst, the first few have only not been admitted yet.
            if len(self.reqs) >= self.prefill.max_rows + self._max_queued_requests:
                raise Refusal(QUEUE_FULL)
            req = to_req(obj, self._serial, received, self._limits, self._tokenizer)
        except Refusal as refusal:
            self._refusals.append(refusal_row(obj, refusal.reason, received))
            return
        except Exception:
            log.exception("%s: could not be taken in", obj.rid)
            self._refusals.append(refusal_row(obj, FAULT, received))
            return
        self._serial += 1
        self.reqs[req.rid] = req
        self.prefill.waiting.push_back(req)

    def _begin_epoch(self, message: NewDetokenizerReq) -> None:
        """Everyone alive ends without a word, and all credits are back: nobody is left who would fold what has been sent."""
        self._end([(req, ABORTED) for req in self.reqs.values()])
        self._due.clear()
        self._refusals.clear()
        self.credits = MAX_BATCHES_IN_FLIGHT
        self._outbox.replace_detokenizer(message.detokenizer)
        self._epoch = message.epoch
        self.stats.begin_epoch(message.epoch)

    # ---- admit ----

    def admit(self) -> None:
        """Requests from the queue get a row, a prefix from the cache and their sampler's state."""
        now = time.monotonic()
        admissions = self.prefill.admit(self.running, step=self._runner.count, landed=self._runner.landed)
        self._end(admissions.rejected)
        started: dict[str, list[str]] = {}
        for req in admissions.admitted:
            if req.first_scheduled_time is None:
                req.first_scheduled_time = now
                started.setdefault(req.reply_to, []).append(req.rid)
                self.stats.prompt_tokens += req.num_prompt
                self.stats.cached_tokens += req.cached_tokens
            else:
                req.mark(SchedulerMark(now, "readmitted", req.kv_len))
            try:
                self.executor.release(req.req_pool_idx)  # nothing, unless that failed for whoever had the row before
                self.executor.bind(req.req_pool_idx, req.sampling_params, req.prompt_ids, np.array(req.output_ids, dtype=np.int32))
            except Exception:
                log.exception("%s: its sampler could not be made", req.rid)
                self._end([(req, FAULT)])
        for server, rids in started.items():
            self._outbox.to_server(server, SchedulingStarted(epoch=self._epoch, rids=rids, time=now))

    # ---- choose ----

    def choose(self) -> ScheduleBatch | None:
        """This step's rows, with slots for all of them: every running row, and as much prefill as the budget allows.

        None where there is nobody, or where memory is too short before the step in flight, which may free some, has been read.
        """
        while True:
            decodes = self._grow_running()
            if decodes is not None:
                chunks, failed = self.prefill.chunks()
                self._end([(req, FAULT) for req in failed])
                if chunks or len(decodes):
                    return ScheduleBatch(decodes, chunks)
            if self._in_flight or not (self.running.reqs or self.prefill.active):
                return None
            self._retract_one()

    def _grow_running(self) -> Decodes | None:
        """Who takes a token of this step, with a slot for it; None where memory is too short for that."""
        latest = self._in_flight.latest
        decodes = self.running.next_decodes([] if latest is None else latest.fresh())
        try:
            return decodes if self.running.grow(decodes, self.ledger) else None
        except Exception:
            log.exception("running rows could not grow together")
            enough, failed = self.running.grow_one_by_one(decodes, self.ledger)
            self._end([(req, FAULT) for req in failed])
            going = [i for i, req in enumerate(decodes.reqs) if req.state is not ReqState.FINISHED]
            return decodes.only(going) if enough else None

    def _retract_one(self) -> None:
        """Memory has run out, and nothing is in flight: take it from one request (`choose_victim`). One that is alone and still short can
        never be served."""
        candidates = [*self.running.reqs, *self.prefill.active]
        if len(candidates) == 1:
            self._end([(candidates[0], DOES_NOT_FIT)])
            return
        req = choose_victim(candidates)
        self._leave(req)
        req.mark(SchedulerMark(time.monotonic(), "retracted", req.kv_len))
        self._give_back(req, keep_kv=True)
        req.state = ReqState.WAITING
        req.retractions += 1
        self.stats.retractions += 1
        self.prefill.waiting.push_front([req])
        self.prefill.ratio.retracted([*self.running.reqs, *self.prefill.active])

    # ---- submit, take ----

    def submit(self, batch: ScheduleBatch) -> int:
        """Start a step. Returns how many steps may stay in flight now.

        None where the executor has nothing to gain by it, and none on top of a step that is known to have failed.
        """
        self.stats.max_batch_size = max(self.stats.max_batch_size, batch.num_rows)
        flight = self._runner.submit(batch)
        if batch.decodes.reqs:
            self.prefill.ratio.step()
        return 1 if self.executor.info.overlap and not flight.has_failed else 0

    def take(self, *, leave: int) -> None:
        """Read the steps in flight, oldest first, but the last `leave`, and take in what came of them."""
        while len(self._in_flight) > leave:
            try:
                self._apply(self._runner.land())
            finally:
                for req, keep_kv in self._in_flight.released():
                    self._give_back(req, keep_kv=keep_kv)
        self.stats.steps = self._runner.count

    def _apply(self, result: StepResult) -> None:
        self.stats.output_tokens += result.num_tokens
        self._due.update(dict.fromkeys(result.due))
        for req in result.sampled:
            try:
                self.prefill.leave(req)
                self.running.add(req)
            except Exception:
                log.exception("%s: it could not join those that run", req.rid)
                result.finished.append((req, FAULT))
        if result.finished:
            self._end(result.finished)

    # ---- endings ----

    def _end(self, endings: Sequence[tuple[Req, FinishReason]]) -> None:
        """Each is due its terminal row, whatever state it is in, and gives back all that it holds as soon as no step in flight uses it
        (whole pages of what it has computed are the cache's at once)."""
        endings = [(req, reason) for req, reason in endings if req.state is not ReqState.FINISHED]
        gone = {req for req, _ in endings if req.state is ReqState.RUNNING}
        if gone:
            self.running.remove(gone)
        for req, reason in endings:
            if req not in gone:
                self._try(req, self._leave)
            self._give_back(req, keep_kv=reason not in SUSPECT)
            req.state = ReqState.FINISHED
            req.finished_reason = reason
            del self.reqs[req.rid]
            self._due[req] = None

    def _leave(self, req: Req) -> None:
        """Take `req` out of where its state says it is."""
        match req.state:
            case ReqState.WAITING:
                self.prefill.forget(req)
            case ReqState.PREFILL:
                self.prefill.leave(req)
            case ReqState.RUNNING:
                self.running.remove({req})
            case ReqState.FINISHED:
                pass
            case _:
                assert_never(req.state)

    def _give_back(self, req: Req, *, keep_kv: bool) -> None:
        if req.req_pool_idx < 0:
            return
        if self._in_flight.uses(req):
            if keep_kv:  # what it has already is there for a next turn that comes before that step is over
                self._try(req, lambda req: self.ledger.cache_computed(req, in_flight=True))
            self._in_flight.hold(req, keep_kv=keep_kv)
            return
        # Each by itself: where one fails the others still go back, and a leak is better than a slot with two owners.
        self._try(req, lambda req: self.executor.release(req.req_pool_idx))
        if keep_kv:
            self._try(req, lambda req: self.ledger.cache_computed(req, last=True))
        self._try(req, self.ledger.close)

    def _try(self, req: Req, part: Callable[[Req], None]) -> None:
        """One part of an ending; a fault in it keeps no other part from being done."""
        try:
            part(req)
        except Exception:
            log.exception("%s: handing on or giving back what it held failed", req.rid)

    def shutdown(self) -> None:
        """Everyone alive gets a terminal row. A step in flight is given up: nobody waits for it any more."""
        self._end([(req, SHUTTING_DOWN) for req in self.reqs.values()])
        self.credits = max(self.credits, 1)
        self.publish()
        self.executor.shutdown()
        self._runner.abandon()
        for req, _ in self._in_flight.released():
            self._give_back(req, keep_kv=False)
        self.publish()  # the last gauge

    # ---- publish ----

    def publish(self) -> None:
        """One message with everything that is due, the gauge now and then, and the books checked."""
        if self.credits > 0 and (self._due or self._refusals):
            output, failed = to_token_id_output(self._epoch, list(self._due), self._refusals)
            self._outbox.to_detokenizer(output)
            self.credits -= 1
            mark_sent(self._due)
            self._end([(req, FAULT) for req in failed])  # its row says so already
            self._due = {}
            self._refusals = []
        now = time.monotonic()
        if self.is_idle:
            self.prefill.ratio.reset()
        if self.is_idle or self.stats.due(now):
            stats = self.stats.take(
                now,
                running=len(self.running) + len(self.prefill.active),
                waiting=self.prefill.num_waiting,
                used=self.ledger.used,
                evictable=self.ledger.cache.evictable_size,
            )
            if stats is not None:
                self._outbox.to_server(None, stats)
        self._check_books()

    def _check_books(self) -> None:
        """A leak is told once and lived with; tests are told every time."""
        if self._check_every_slot:
            check_ownership(self.ledger, (*self.reqs.values(), *self._in_flight.departing))
        elif self._books_balance:
            try:
                check_counts(self.ledger)
            except InvariantViolation:
                self._books_balance = False
                log.exception("KV accounting")
