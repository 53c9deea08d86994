"""When the steps of a threaded executor run, decided by the test: anything that changes too early under a step is seen by a late one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from sterna.executor.base import ForwardBatch, StepHandle, StepOutput
from sterna.executor.scripted import ScriptedExecutor

TIMEOUT_S = 60
Moment = Literal["early", "whenever", "late"]
"""Before `submit` returns; beside whatever else happens; not before its result is asked for."""


class Gates:
    def __init__(self, executor: ScriptedExecutor, moment: Callable[[], Moment]) -> None:
        """Of an executor with the option `threaded=1`."""
        self.num_sampled = 0
        """Tokens in all the results that were read."""
        self.late = 0
        self._moment = moment
        self._opened: dict[int, threading.Event] = {}
        self._ran: dict[int, threading.Event] = {}
        self._run, executor._run = executor._run, self._run_when_open  # type: ignore[method-assign]
        self._submit, executor.submit = executor.submit, self._submit_behind_gate  # type: ignore[method-assign]

    def _run_when_open(self, batch: ForwardBatch) -> StepOutput:
        assert self._opened[batch.step].wait(TIMEOUT_S), f"step {batch.step} was never asked for"
        try:
            return self._run(batch)
        finally:
            self._ran[batch.step].set()

    def _submit_behind_gate(self, batch: ForwardBatch) -> StepHandle:
        step, moment = batch.step, self._moment()
        self._opened[step], self._ran[step] = threading.Event(), threading.Event()
        handle = self._submit(batch)
        if moment == "late":
            self.late += 1
        else:
            self._opened[step].set()
        # A step before it that is late makes it late too: they run in their order.
        if moment == "early" and all(opened.is_set() for opened in self._opened.values()):
            assert self._ran[step].wait(TIMEOUT_S)
        return GatedStep(self, step, handle)

    def read(self, step: int, handle: StepHandle) -> StepOutput:
        self._opened[step].set()
        output = handle.result()
        self.num_sampled += len(output.token_ids)
        return output


class GatedStep:
    def __init__(self, gates: Gates, step: int, handle: StepHandle) -> None:
        self._gates, self._step, self._handle = gates, step, handle

    def result(self) -> StepOutput:
        return self._gates.read(self._step, self._handle)
