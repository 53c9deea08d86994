"""When a request's time is over. One heap and one timer of the event loop for all requests, however many there are.

    waiting timeout    from admission, until the scheduler has begun it         503 waiting_timeout
    running timeout    from there, however often it is retracted or replayed    504 running_timeout
    deadline           the request's own `timeout`, from its arrival            504 deadline_exceeded

Whatever comes first ends it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sterna.errors import DeadlineExceeded, RunningTimeout, WaitingTimeout
from sterna.protocol.finish import FinishAbort, to_finish

if TYPE_CHECKING:
    from sterna.tokenizer_manager.admission import Admission

log = logging.getLogger(__name__)

HEAP_SLACK = 64
"""Outdated entries that may be kept beside as many as there are valid ones."""

DEADLINE = to_finish(DeadlineExceeded("the request's timeout is over"))


class Due(NamedTuple):
    when: float
    serial: int
    """Makes it unique."""
    admission: Admission
    reason: FinishAbort


class Deadlines:
    """Owned by the server's event loop, which must be running when somebody is watched who has a deadline. Timeouts are seconds; None is
    no limit."""

    def __init__(
        self, waiting_s: float | None, running_s: float | None, clock: Callable[[], float], retry_after_s: Callable[[], int]
    ) -> None:
        """`retry_after_s`: what somebody is told who waited in vain."""
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._waiting = to_finish(WaitingTimeout(f"not begun within {waiting_s:g} s")) if waiting_s else None
        self._running = to_finish(RunningTimeout(f"not done {running_s:g} s after it began")) if running_s else None
        self._due: dict[Admission, Due] = {}
        self._heap: list[Due] = []
        """The values of `_due`, and outdated ones."""
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many are watched."""
        return len(self._due)

    def watch(self, admission: Admission) -> None:
        """It has just been admitted."""
        self._set(admission, self._waiting, None if self._waiting_s is None else self._clock() + self._waiting_s)

    def begin(self, admission: Admission, at: float) -> None:
        """The scheduler began it at `at`."""
        self._set(admission, self._running, None if self._running_s is None else at + self._running_s)

    def again(self, admission: Admission, reason: FinishAbort, seconds: float) -> None:
        """Its time was over, and it gets `seconds` more to end in order; then it is told once more."""
        if not admission.closed:
            self._add(admission, self._clock() + seconds, reason)

    def forget(self, admission: Admission) -> None:
        self._due.pop(admission, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, admission: Admission, limit: FinishAbort | None, when: float | None) -> None:
        """The earlier one of `when` and its own deadline."""
        deadline = admission.terms.deadline
        if deadline is not None and (when is None or deadline <= when):
            limit, when = DEADLINE, deadline
        if limit is None or when is None:
            self._due.pop(admission, None)
        else:
            self._add(admission, when, limit)

    def _add(self, admission: Admission, when: float, reason: FinishAbort) -> None:
        if len(self._heap) >= 2 * len(self._due) + HEAP_SLACK:
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)
        self._serial += 1
        due = Due(when, self._serial, admission, reason)
        self._due[admission] = due
        heapq.heappush(self._heap, due)
        if self._heap[0] is due:
            self._arm()

    def _arm(self) -> None:
        self.close()
        if self._heap:
            # Never early by the loop's own clock, which may tick in milliseconds.
            self._timer = asyncio.get_running_loop().call_later(max(self._heap[0].when - self._clock(), 0) + 0.001, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock()
        over: list[Due] = []
        while self._heap and (self._heap[0].when <= now or self._due.get(self._heap[0].admission) is not self._heap[0]):
            due = heapq.heappop(self._heap)
            if self._due.get(due.admission) is due:
                del self._due[due.admission]
                over.append(due)
        for due in over:  # all are off the books before the first acts: whatever it does, it finds them in order
            reason = due.reason
            if reason is self._waiting:
                reason = msgspec.structs.replace(reason, retry_after_s=self._retry_after_s())
            try:
                due.admission.end(reason)
            except Exception:  # the others' time is over too
                log.exception("%s: it could not be ended", due.admission.rid)
        if self._timer is None:
            self._arm()
