"""A scheduler whose steps overlap, over an executor that runs them in a thread: when, is decided by the test, so that anything that
changes too early under a step is seen by a late one; and what the executor was told, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import pytest

from sterna.executor.base import ForwardBatch, StepHandle, StepOutput
from sterna.executor.scripted import ScriptedExecutor
from unit.scheduler.harness import Harness

LONG = [k % 89 + 1 for k in range(120)]
TIMEOUT_S = 60
Moment = Literal["early", "whenever", "late"]
"""Before `submit` returns; beside whatever else happens; not before its result is asked for."""


MOMENTS = pytest.mark.parametrize("moment", ["early", "whenever", "late"])


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


class Log:
    """What the executor was told, in order: ("submit", step), ("read", step), ("bind", row), ("release", row)."""

    def __init__(self, h: Harness) -> None:
        self.events: list[tuple[str, int]] = []
        self.batches: list[ForwardBatch] = []
        self._h = h
        self._submit, h.executor.submit = h.executor.submit, self._logged_submit  # type: ignore[method-assign]
        for name in ("bind", "release"):
            monitored = getattr(h.executor, name)
            setattr(h.executor, name, lambda row, *rest, name=name, call=monitored: (call(row, *rest), self.events.append((name, row)))[0])

    def _logged_submit(self, batch: ForwardBatch) -> StepHandle:
        self.batches.append(batch)
        self.events.append(("submit", batch.step))
        return LoggedStep(self, batch.step, self._submit(batch))

    def on_top(self) -> list[int]:
        """Steps that were submitted before the one before them was read."""
        return [
            step
            for at, (what, step) in enumerate(self.events)
            if what == "submit" and ("submit", step - 1) in self.events[:at] and ("read", step - 1) not in self.events[:at]
        ]


class LoggedStep:
    def __init__(self, log: Log, step: int, handle: StepHandle) -> None:
        self._log, self._step, self._handle = log, step, handle

    def result(self) -> StepOutput:
        self._log.events.append(("read", self._step))
        return self._handle.result()


def overlapped(options: str = "", *, moment: Moment = "late", **settings: object) -> tuple[Harness, Gates, Log]:
    h = Harness(options=f"overlap=1,threaded=1,{options}", **settings)  # type: ignore[arg-type]
    gates = Gates(h.executor, lambda: moment)
    return h, gates, Log(h)


def close(h: Harness) -> None:
    h.assert_at_baseline()
    h.executor.shutdown()
