"""How much memory each process of a server has, and whether that grows."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

WINDOW_S = 30.0


def pss_mb(pid: int) -> float:
    """Proportional set size, in MB. Raises OSError where the process is gone."""
    match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(match[1]) / 1000 if match else 0.0


class MemorySeries:
    """Samples over time, by process name."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, name: str, time_s: float, mb: float) -> None:
        self._samples[name].append((time_s, mb))

    @property
    def names(self) -> list[str]:
        return list(self._samples)

    def last(self, name: str) -> float:
        return self._samples[name][-1][1]

    def first(self, name: str) -> float:
        return self._samples[name][0][1]

    def slope(self, name: str) -> float:
        """MB a minute of what the process keeps, by least squares over the second half: by then caches and pools are full.

        What it keeps is its least in each `WINDOW_S`: a large request takes tens of MB and gives them back, a leak never does.
        """
        lows: dict[int, tuple[float, float]] = {}
        samples = self._samples[name][len(self._samples[name]) // 2 :]
        for t, mb in samples:
            lows[int(t // WINDOW_S)] = min(lows.get(int(t // WINDOW_S), (t, mb)), (t, mb), key=lambda sample: sample[1])
        mean_t = sum(t for t, _ in lows.values()) / len(lows)
        mean_mb = sum(mb for _, mb in lows.values()) / len(lows)
        spread = sum((t - mean_t) ** 2 for t, _ in lows.values())
        return 60 * sum((t - mean_t) * (mb - mean_mb) for t, mb in lows.values()) / spread if spread else 0.0
