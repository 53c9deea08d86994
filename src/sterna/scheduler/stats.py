"""The scheduler's gauge: `SchedulerStats`, sent when it changed and not too often."""

from __future__ import annotations

import msgspec

from sterna.protocol.control import SchedulerStats

MIN_INTERVAL_S = 0.25


class StatsKeeper:
    """Counts since start, and when the last gauge was sent."""

    def __init__(self, epoch: int, kv_total_tokens: int) -> None:
        self._epoch = epoch
        self._kv_total_tokens = kv_total_tokens
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retractions = 0
        self.steps = 0
        self.max_batch_size = 0
        self._last: SchedulerStats | None = None
        self._last_time = 0.0

    def begin_epoch(self, epoch: int) -> None:
        """The next gauge is sent even where nothing has changed: its reader knows none of this epoch."""
        self._epoch = epoch
        self._last = None

    def due(self, now: float) -> bool:
        return now - self._last_time >= MIN_INTERVAL_S

    def take(self, now: float, *, running: int, waiting: int, used: int, evictable: int) -> SchedulerStats | None:
        """The gauge as it is now; None where nothing changed since the last one."""
        self._last_time = now
        stats = SchedulerStats(
            epoch=self._epoch,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            kv_total_tokens=self._kv_total_tokens,
            kv_used_tokens=used,
            kv_evictable_tokens=evictable,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            output_tokens_total=self.output_tokens,
            retractions_total=self.retractions,
            steps_total=self.steps,
            max_batch_size=self.max_batch_size,
        )
        if self._last is not None and msgspec.structs.asdict(stats) == msgspec.structs.asdict(self._last):
            return None
        self._last = stats
        return stats
