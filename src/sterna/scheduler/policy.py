"""The order of the waiting queue: fcfs (first come first served) or lpm (longest prefix match)."""

from __future__ import annotations

import logging
from typing import Literal

from sterna.mem_cache.prefix_cache import PrefixCache
from sterna.scheduler.req import Req
from sterna.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)

LPM_MAX_WAITING = 128
"""With more waiting, lpm is fcfs: matching them all would cost more than it saves."""


class SchedulePolicy:
    def __init__(self, name: Literal["fcfs", "lpm"], cache: PrefixCache) -> None:
        self._lpm = name == "lpm"
        self._cache = cache
        self._sorted_for: tuple[int, int] | None = None

    def sort(self, waiting: WaitingQueue) -> None:
        """Bring `waiting` into the policy's order; those that were retracted stay in front. Free where nothing has changed."""
        if not self._lpm or not 1 < len(waiting) <= LPM_MAX_WAITING or self._sorted_for == (waiting.version, self._cache.version):
            return
        try:
            waiting.reorder(sorted(waiting, key=self._rank))
        except Exception:
            log.exception("the waiting queue can't be sorted; first come first served until it changes")
            waiting.reorder(sorted(waiting, key=lambda req: req.serial))
        self._sorted_for = (waiting.version, self._cache.version)

    def _rank(self, req: Req) -> tuple[bool, int, int]:
        if req.retractions:
            return False, 0, req.serial
        matched = self._cache.match_length(req.cache_namespace, req.cache_key(req.num_prompt), req.num_prompt - 1)
        return True, -matched, req.serial
