"""When a request's time is over. One heap and one timer of the event loop for all requests, however many there are.

    waiting timeout    from admission, until the scheduler has begun it         503 waiting_timeout
    running timeout    from there, however often it is retracted or replayed    504 running_timeout
    deadline           the request's own `timeout`, from its arrival            504 deadline_exceeded

Whatever comes first ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from sterna.errors import DeadlineExceeded, RunningTimeout, WaitingTimeout
from sterna.keyed_heap import KeyedHeap
from sterna.protocol.finish import FinishAbort, to_finish

if TYPE_CHECKING:
    from sterna.tokenizer_manager.admission import Admission

log = logging.getLogger(__name__)

DEADLINE = to_finish(DeadlineExceeded("the request's timeout is over"))


@dataclass(slots=True, frozen=True, order=True)
class Due:
    when: float
    reason: FinishAbort = field(compare=False)


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
        self._due: KeyedHeap[Admission, Due] = KeyedHeap()
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
        self._due.discard(admission)

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
            self._due.discard(admission)
        else:
            self._add(admission, when, limit)

    def _add(self, admission: Admission, when: float, reason: FinishAbort) -> None:
        self._due.put(admission, Due(when, reason))
        first = self._due.first()
        if first is not None and first[0] is admission:
            self._arm(when)

    def _arm(self, when: float) -> None:
        self.close()
        # Never early by the loop's own clock, which may tick in milliseconds.
        self._timer = asyncio.get_running_loop().call_later(max(when - self._clock(), 0) + 0.001, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock()
        over: list[tuple[Admission, FinishAbort]] = []
        while (first := self._due.first()) is not None and first[1].when <= now:
            self._due.discard(first[0])
            over.append((first[0], first[1].reason))
        for admission, reason in over:  # all are off the books before the first acts: whatever it does, it finds them in order
            if reason is self._waiting:
                reason = msgspec.structs.replace(reason, retry_after_s=self._retry_after_s())
            try:
                admission.end(reason)
            except Exception:  # the others' time is over too
                log.exception("%s: it could not be ended", admission.rid)
        if self._timer is None and (first := self._due.first()) is not None:
            self._arm(first[1].when)
