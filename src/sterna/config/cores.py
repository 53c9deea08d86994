"""How many cores the process may use, which in a container is rarely how many the machine has."""

from __future__ import annotations

import os
from pathlib import Path

from sterna.config.cgroup import directories, read_number


def usable_cores(*, root: Path = Path("/")) -> int:
    """The smaller of the scheduler's affinity and the cgroup's CPU quota (version 1 or 2, rounded down), at least 1.

    `root` is where `/proc` and `/sys` are looked for.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for directory in directories("cpu", root=root) if (quota := _quota(directory)) is not None]
    return max(1, min(cores, *(int(quota) for quota in quotas))) if quotas else cores


def _quota(directory: Path) -> float | None:
    """Cores' worth of time that a group may take; None where it is unlimited."""
    try:
        limit, period = (directory / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    limit_us, period_us = read_number(directory / "cpu.cfs_quota_us"), read_number(directory / "cpu.cfs_period_us")
    if limit_us is None or limit_us <= 0 or not period_us:
        return None
    return limit_us / period_us
