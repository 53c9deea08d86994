"""One step of the executor, and what is done where it fails: its rows are run again one by one, so that only the culprit ends.

Who fails alone too ends with 500. That costs as many steps as the failed one had rows, and nothing where none fails.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from sterna.executor.base import Executor
from sterna.protocol.finish import FAULT
from sterna.scheduler.batch import ScheduleBatch, to_forward_batch
from sterna.scheduler.decode import RunningBatch
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req
from sterna.scheduler.results import ResultTaker, RowTokens, StepResult, tokens_by_row

log = logging.getLogger(__name__)


class StepRunner:
    def __init__(self, executor: Executor, ledger: KVLedger, results: ResultTaker) -> None:
        self.count = 0
        """Steps submitted, and the number of the next one."""
        self._executor = executor
        self._ledger = ledger
        self._results = results

    def run(self, batch: ScheduleBatch, running: RunningBatch) -> StepResult:
        """Run `batch` and take in what came of it. Raises nothing that one row's fault could cause."""
        try:
            tokens = self._execute(batch, running)
        except Exception:
            log.exception("step %d of %d rows failed", self.count - 1, batch.num_rows)
            return self._run_one_by_one(batch, running)
        return self._results.take(batch, running, tokens, time.monotonic())

    def _execute(self, batch: ScheduleBatch, running: RunningBatch) -> RowTokens:
        """Changes nothing of the scheduler's."""
        step = self.count
        self.count += 1
        forward = to_forward_batch(batch, running, self._ledger, step)
        return tokens_by_row(self._executor.submit(forward).result(), batch.num_rows)

    def _run_one_by_one(self, batch: ScheduleBatch, running: RunningBatch) -> StepResult:
        result = StepResult()
        for row in batch.single_rows():
            req = row.only_req(running)
            try:
                self._rebind(req)
                tokens = self._execute(row, running)
            except Exception:
                log.exception("%s: its row fails alone too", req.rid)
                result.finished.append((req, FAULT))
                continue
            result.add(self._results.take(row, running, tokens, time.monotonic()))
        return result

    def _rebind(self, req: Req) -> None:
        """The failed step may have sampled for this row before it failed: its sampler's state is made again from what was taken in."""
        self._executor.release(req.req_pool_idx)
        self._executor.bind(req.req_pool_idx, req.sampling_params, req.prompt_ids, np.array(req.output_ids, dtype=np.int32))
