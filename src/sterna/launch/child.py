"""One child process: spawned, watched, stopped, and spawned again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from typing import NamedTuple

import msgspec

from sterna.config.process_start import ProcessStart
from sterna.launch.events import first_of
from sterna.protocol.control import EndCause, ProcessName

log = logging.getLogger(__name__)

CHILDREN: dict[ProcessName, str] = {"scheduler": "sterna.scheduler.process", "detokenizer": "sterna.detokenizer.process"}
CHILD_DEFAULTS = {
    # NumPy's BLAS does nothing in our processes but hold threads and their memory.
    "OPENBLAS_NUM_THREADS": "1",
    # PyTorch's threads spin between two operations, by default for longer than a time slice: whoever else wants a core (our own HTTP,
    # too) then stalls every operation. Long enough to bridge a gap, no longer: docs/performance.md has the figures.
    "GOMP_SPINCOUNT": "8000",
}
KEY_VARIABLES = frozenset({"STERNA_API_KEY", "STERNA_ADMIN_API_KEY"})
STOP_TIMEOUT_S = 2.0
"""For a child that was told to stop; then it is killed."""


class Death(NamedTuple):
    cause: EndCause
    code: int
    lived_s: float

    def __str__(self) -> str:
        return f"{'exit code' if self.cause == 'exit' else 'signal'} {self.code}"


class Child:
    def __init__(self, name: ProcessName) -> None:
        self.name = name
        self._process: asyncio.subprocess.Process | None = None
        self._spawned = 0.0

    async def spawn(self, start: ProcessStart) -> None:
        """It gets a session of its own, so that a terminal's signals reach it through us only. Raises OSError."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CHILDREN[self.name], stdin=asyncio.subprocess.PIPE, env=_environment(), start_new_session=True
        )
        self._spawned = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died already: `wait` says so
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            await self._process.stdin.drain()

    async def wait(self) -> Death:
        """Until it ends."""
        assert self._process is not None
        code = await self._process.wait()
        return Death("signal" if code < 0 else "exit", abs(code), time.monotonic() - self._spawned)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Wait for its end, which it has been told to come to; kill it if it takes too long, or as soon as `at_once` is set."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        await first_of(STOP_TIMEOUT_S, process.wait(), at_once.wait())
        if process.returncode is None:
            log.warning("%s did not stop; killing it", self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _environment() -> dict[str, str]:
    """Ours, without the keys, which no child needs; what the user has set wins over our defaults."""
    inherited = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    return CHILD_DEFAULTS | inherited
