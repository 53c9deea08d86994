"""Steps in flight: submitted, and not read yet. And whose ending has to wait for one.

    loop      │ receive, admit, choose, submit 7, take 6, publish │ receive, admit, choose, submit 8, take 7, publish │ …
    executor  │ ─────────── step 6 ──────────────┤├──────────────── step 7 ───────────────────────────────┤├── step 8 …

Between two turns at most one step is in flight, and inside a turn two. Whoever ends meanwhile ends at once for the world outside, but what
a step in flight reads or writes stays his until that step has returned: slots, row, sampler. (Whole pages that it only reads are the
cache's at once, and locked.) What it still samples for him is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sterna.executor.base import StepHandle, StepOutput
from sterna.mem_cache.allocator import Int32Array
from sterna.scheduler.batch import ScheduleBatch
from sterna.scheduler.req import Req, ReqState


@dataclass(slots=True, frozen=True)
class FailedStep:
    """Stands for a step that could not be submitted."""

    fault: Exception

    def result(self) -> StepOutput:
        raise self.fault


class Flight:
    def __init__(self, step: int, batch: ScheduleBatch, handle: StepHandle, num_rows: int) -> None:
        """`num_rows`: of `req_to_token`."""
        self.step = step
        self.batch = batch
        self.handle = handle
        self._num_rows = num_rows

    @property
    def has_failed(self) -> bool:
        """Known before it is read."""
        return isinstance(self.handle, FailedStep)

    @cached_property
    def row_of(self) -> Int32Array:
        """(num_rows,): by `req_pool_idx`, the row of this step that is his; -1 where none is."""
        row_of = np.full(self._num_rows, -1, dtype=np.int32)
        decodes, chunks = self.batch.decodes.rows, self.batch.chunks
        row_of[decodes] = np.arange(len(decodes), dtype=np.int32)
        for row, chunk in enumerate(chunks, start=len(decodes)):
            row_of[chunk.req.req_pool_idx] = row
        return row_of

    def fresh(self) -> list[Req]:
        """Who gets his first token by it: he may take the step after it, and joins those that run when it has been read."""
        return [chunk.req for chunk in self.batch.chunks if chunk.is_last and chunk.req.state is ReqState.PREFILL]


class InFlight:
    """The steps in flight, oldest first."""

    def __init__(self) -> None:
        self.departing: dict[Req, bool] = {}
        """Who has ended and is still in a step in flight -> whether his KV may be cached."""
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def latest(self) -> Flight | None:
        return self._flights[-1] if self._flights else None

    def add(self, flight: Flight) -> None:
        self._flights.append(flight)

    def pop(self) -> Flight:
        """The oldest, to be read: from here on it isn't in flight."""
        return self._flights.popleft()

    def uses(self, req: Req) -> bool:
        """Whether a step in flight has to do with `req`, which has a row."""
        return any(flight.row_of[req.req_pool_idx] >= 0 for flight in self._flights)

    def hold(self, req: Req, *, keep_kv: bool) -> None:
        """`req` has ended and is still used."""
        self.departing[req] = keep_kv

    def released(self) -> list[tuple[Req, bool]]:
        """Those of the departing that no step uses any longer; they are departing no more."""
        if not self.departing:
            return []
        released = [(req, keep_kv) for req, keep_kv in self.departing.items() if not self.uses(req)]
        for req, _ in released:
            del self.departing[req]
        return released
