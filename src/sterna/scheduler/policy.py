"""The order of the waiting queue: fcfs (first come first served), lpm (longest prefix match) or priority.

The last two are fcfs with head starts: a request is treated as if it had come so many seconds earlier. So whoever waits overtakes in the
end everyone who comes later than the longest head start, and nothing starves:

    priority   `--priority-ageing` seconds per level
    lpm        `LPM_HEAD_START_S` per token of cached prefix, at most `LPM_MAX_HEAD_START_S`
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from sterna.mem_cache.prefix_cache import PrefixCache
from sterna.scheduler.req import Req
from sterna.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)

LPM_MAX_WAITING = 128
"""With more waiting, lpm is fcfs: matching them all would cost more than it saves."""
LPM_HEAD_START_S = 0.01
"""About ten times what computing a token of prompt takes: prefixes decide among those that came together, age among the others."""
LPM_MAX_HEAD_START_S = 30.0


class SchedulePolicy:
    def __init__(self, name: Literal["fcfs", "lpm", "priority"], cache: PrefixCache, *, priority_ageing_s: float) -> None:
        self.order: Callable[[Req], float] | None = self._by_priority if name == "priority" else None
        """For `WaitingQueue`: the place of each newcomer, if that isn't the end."""
        self._lpm = name == "lpm"
        self._cache = cache
        self._priority_ageing_s = priority_ageing_s
        self._sorted_for: tuple[int, int] | None = None

    def _by_priority(self, req: Req) -> float:
        return req.arrival_time - req.priority * self._priority_ageing_s

    def sort(self, waiting: WaitingQueue) -> None:
        """Bring `waiting` into lpm's order; those that were retracted stay in front. Free where nothing has changed, and without lpm."""
        if not self._lpm or not 1 < len(waiting) <= LPM_MAX_WAITING or self._sorted_for == (waiting.version, self._cache.version):
            return
        try:
            waiting.reorder(sorted(waiting, key=self._rank))
        except Exception:
            log.exception("the waiting queue can't be sorted; first come first served until it changes")
            waiting.reorder(sorted(waiting, key=lambda req: req.serial))
        self._sorted_for = (waiting.version, self._cache.version)

    def _rank(self, req: Req) -> tuple[bool, float, int]:
        if req.retractions:
            return False, 0, req.serial
        matched = self._cache.match_length(req.cache_namespace, req.cache_key(req.num_prompt), req.num_prompt - 1)
        return True, req.arrival_time - min(matched * LPM_HEAD_START_S, LPM_MAX_HEAD_START_S), req.serial
