"""How much memory the process may still take, and how people write amounts of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sterna.config.cgroup import directories, read_number
from sterna.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")


def parse_bytes(text: str, flag: str) -> int:
    """Bytes in `2GB` (10^9), `512MiB` or `512M` (2^20), `1.5 GiB`, `1073741824`. Raises ConfigError naming `flag`."""
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{flag} must be an amount of memory such as 2GB or 512MiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(amount: int) -> str:
    """`1.5 GiB`"""
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def available_memory_bytes(*, root: Path = Path("/")) -> int:
    """What can be taken without swapping or breaking a cgroup's limit (version 1 or 2); file cache counts as free.

    `root` is where `/proc` and `/sys` are looked for.
    """
    rooms = [room for directory in directories("memory", root=root) if (room := _room(directory)) is not None]
    return max(0, min([_machine(root), *rooms]))


def _machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _room(directory: Path) -> int | None:
    """What a group may still take; None where it has no limit."""
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = read_number(directory / limit_file), read_number(directory / usage_file)
        if limit is not None and usage is not None:
            return limit - usage + _statistic(directory / "memory.stat", cache_key)
    return None


def _statistic(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == key), 0)
