"""What is done to whom, where, and when.

    Fault(process, act, point, moment)

`point` is a row of `POINTS`, before or after: the process does it to itself there, between two lines of its own code. Without a point the
signal comes from outside, whatever the process is doing. `moment` is a row of `MOMENTS`: how far the clients must have got. A moment, a
point and an act are one line each; `Strike.happened` says that it came to pass, where the process was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from faults.load import Load

Process = Literal["server", "scheduler", "detokenizer"]
Act = Literal["kill", "stop", "delay", "raise"]

STOP_S = 3.0
DELAY_S = 0.7

POINTS: dict[str, tuple[str, str, str | None]] = {
    "server.tokenize": ("sterna.tokenizer_manager.tokenize", "to_tokenized", None),
    "server.send": ("sterna.ipc.channel", "Sender.send", "TokenizedGenerateReqInput"),
    "server.credit": ("sterna.ipc.channel", "Sender.send", "OutputCredit"),
    "server.fold": ("sterna.tokenizer_manager.receive", "fold", None),
    "scheduler.intake": ("sterna.scheduler.intake", "to_req", None),
    "scheduler.bind": ("sterna.executor.native.executor", "NativeExecutor.bind", None),
    "scheduler.submit": ("sterna.executor.native.executor", "NativeExecutor.submit", None),
    "scheduler.land": ("sterna.scheduler.step", "StepRunner.land", None),
    "scheduler.retract": ("sterna.scheduler.scheduler", "Scheduler._retract_one", None),
    "scheduler.output": ("sterna.scheduler.output", "to_token_id_output", None),
    "scheduler.send": ("sterna.ipc.channel", "Sender.send", "BatchTokenIDOutput"),
    "scheduler.stats": ("sterna.ipc.channel", "Sender.send", "SchedulerStats"),
    "detokenizer.receive": ("sterna.detokenizer.manager", "DetokenizerManager.to_str_output", None),
    "detokenizer.decode": ("sterna.text.incremental", "push_batch", None),
    "detokenizer.send": ("sterna.ipc.channel", "Sender.send", "BatchStrOutput"),
}
"""Name, its process first → where: module, attribute path, and the type that an argument must have."""

MOMENTS: dict[str, Callable[[Load], bool]] = {
    "at the start": lambda load: load.begun > 0,
    "half are there": lambda load: load.begun > len(load.answers) // 2,
    "first output": lambda load: load.events > 0,
    "all speak": lambda load: load.spoken + load.ended >= sum(answer.ask.streams for answer in load.answers),
    "in full flow": lambda load: load.characters > 40 * len(load.answers),
    "some have ended": lambda load: load.ended > len(load.answers) // 4,
    "most have ended": lambda load: load.ended > 3 * len(load.answers) // 4,
}


@dataclass(frozen=True)
class Fault:
    process: Process
    act: Act
    moment: str
    point: str | None = None
    """`POINTS`' name without its process, and `.before` or `.after`."""

    def __str__(self) -> str:
        return f"{self.act} the {self.process}, {self.moment}" + (f", at {self.point}" if self.point else "")


class Strike:
    """One fault on its way: `watch` it with every event of the load; `settle` when the load is over."""

    def __init__(self, fault: Fault, folder: Path, pid_of: Callable[[str], int]) -> None:
        """`folder` is the server's $FAULTS_DIR; `pid_of` a process's pid at this moment."""
        self.fault = fault
        self.pid: int | None = None
        """Whom it hit."""
        self._folder = folder
        self._pid_of = pid_of
        self._order = folder / f"{fault.process}.{fault.point}"
        self._due = False
        self._cure: asyncio.Task[None] | None = None

    @property
    def happened(self) -> bool:
        return self.pid is not None

    def watch(self, load: Load) -> None:
        if not self._due and MOMENTS[self.fault.moment](load):
            self._due = True
            if self.fault.point is None:
                self._from_outside()
            else:
                self._give_order()
            self._cure = asyncio.get_running_loop().create_task(self._watch_over())

    def _give_order(self) -> None:
        act = f"delay {DELAY_S}" if self.fault.act == "delay" else self.fault.act
        draft = self._order.with_suffix(".draft")
        draft.write_text(act)
        draft.rename(self._order)

    def _from_outside(self) -> None:
        self.pid = self._pid_of(self.fault.process)
        os.kill(self.pid, signal.SIGKILL if self.fault.act == "kill" else signal.SIGSTOP)

    async def _watch_over(self) -> None:
        """Until it has struck; whom it stopped goes on after `STOP_S` (from outside a delay is a shorter stop)."""
        fired = self._folder / f"{self._order.name}.fired"
        while self.pid is None:
            if fired.exists():
                self.pid = int(fired.read_text())
                fired.unlink()
                self._order.with_name(f"{self._order.name}.taken").unlink()
            else:
                await asyncio.sleep(0.005)
        if self.fault.act == "stop" or (self.fault.act == "delay" and self.fault.point is None):
            await asyncio.sleep(STOP_S if self.fault.act == "stop" else DELAY_S)
            os.kill(self.pid, signal.SIGCONT)

    async def settle(self) -> None:
        """The load is over: so is the fault. Who was stopped goes on."""
        if self._cure is not None and self.pid is not None:
            await self._cure
        elif self._cure is not None:
            self._cure.cancel()
            self._order.unlink(missing_ok=True)
