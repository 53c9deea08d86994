"""One step of the executor, from `submit` to what came of it; and what is done where it fails: its rows are run again one by one, so that
only the culprit ends.

Who fails alone too ends with 500 `engine_crashed`, as who makes the process die does (`tokenizer_manager/trials.py`). That costs as many
steps as the failed one had rows, and nothing where none fails. A step that was submitted on top of a failed one took its tokens from
nothing: what it gave is dropped, and the loop chooses its rows again.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from sterna.executor.base import Executor, StepHandle
from sterna.protocol.finish import ENGINE_CRASHED, FAULT
from sterna.scheduler.batch import ScheduleBatch, to_forward_batch
from sterna.scheduler.decode import RunningBatch
from sterna.scheduler.flight import FailedStep, Flight, InFlight
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req, ReqState
from sterna.scheduler.results import ResultTaker, RowTokens, StepResult, tokens_by_row

log = logging.getLogger(__name__)


class StepRunner:
    def __init__(self, executor: Executor, ledger: KVLedger, running: RunningBatch, results: ResultTaker) -> None:
        self.count = 0
        """Steps submitted, and the number of the next one."""
        self.in_flight = InFlight()
        self._executor = executor
        self._ledger = ledger
        self._running = running
        self._results = results

    @property
    def landed(self) -> int:
        """All steps below this number have been read."""
        return self.count - len(self.in_flight)

    def submit(self, batch: ScheduleBatch) -> Flight:
        """Start `batch` on top of what is in flight. Raises nothing that the executor raises: that is for who reads the step."""
        flight = Flight(self.count, batch, self._start(batch), self._ledger.tables.num_rows)
        self.in_flight.add(flight)
        self.count += 1
        return flight

    def _start(self, batch: ScheduleBatch) -> StepHandle:
        before = self.in_flight.latest
        try:
            forward = to_forward_batch(batch, self._running, self._ledger, self.count, None if before is None else before.row_of)
            self._advance(batch)
            return self._executor.submit(forward)
        except Exception as fault:
            return FailedStep(fault)

    def _advance(self, batch: ScheduleBatch) -> None:
        self._running.advance(batch.decodes)
        for chunk in batch.chunks:
            chunk.req.submitted_len = chunk.end
            if chunk.is_last:
                self._running.prepare(chunk.req)

    def land(self) -> StepResult:
        """Read the oldest step in flight and take in what came of it. Raises nothing that one row's fault could cause."""
        flight = self.in_flight.pop()
        try:
            tokens = _read(flight)
        except Exception:
            log.exception("step %d of %d rows failed", flight.step, flight.batch.num_rows)
            return self._run_one_by_one(flight)
        return self._take(flight.batch, tokens)

    def _take(self, batch: ScheduleBatch, tokens: RowTokens) -> StepResult:
        return self._results.take(batch, self._running, tokens, self.in_flight, time.monotonic())

    def abandon(self) -> None:
        """The executor is shut down: let go of the steps in flight, whatever they gave."""
        self._void_the_rest()

    # ---- after a failure ----

    def _run_one_by_one(self, failed: Flight) -> StepResult:
        result = StepResult()
        mine = set(failed.batch.reqs())
        for req in self._void_the_rest():
            if req not in mine and req.state is not ReqState.FINISHED:
                self._try_to_restore(req, result)
        for row in failed.batch.single_rows():
            (req,) = row.reqs()
            if req.state is ReqState.FINISHED or not self._try_to_restore(req, result):
                continue
            self.submit(row)
            try:
                tokens = _read(self.in_flight.pop())
            except Exception:
                log.exception("%s: its row fails alone too: %s", req.rid, req.describe())
                result.finished.append((req, ENGINE_CRASHED))
                continue
            result.add(self._take(row, tokens))
        return result

    def _void_the_rest(self) -> list[Req]:
        """Wait for the steps in flight, whatever becomes of them. Returns whose rows they had."""
        reqs: list[Req] = []
        while len(self.in_flight):
            flight = self.in_flight.pop()
            reqs += flight.batch.reqs()
            try:
                _read(flight)
            except Exception as fault:
                log.info("step %d came to nothing: %s", flight.step, fault)
        return reqs

    def _try_to_restore(self, req: Req, result: StepResult) -> bool:
        """Whether `req` is as it was before what failed; its ending, if not, is in `result`.

        A failed step may have sampled for its row before it failed: its sampler's state is made again from what was taken in.
        """
        if req.state is ReqState.RUNNING:
            self._running.restore(req)
        else:
            req.submitted_len = req.kv_len
        try:
            self._rebind(req)
        except Exception:
            log.exception("%s: its sampler could not be made again", req.rid)
            result.finished.append((req, FAULT))
            return False
        return True

    def _rebind(self, req: Req) -> None:
        self._executor.release(req.req_pool_idx)
        self._executor.bind(req.req_pool_idx, req.sampling_params, req.prompt_ids, np.array(req.output_ids, dtype=np.int32))


def _read(flight: Flight) -> RowTokens:
    return tokens_by_row(flight.handle.result(), flight.batch.num_rows)
