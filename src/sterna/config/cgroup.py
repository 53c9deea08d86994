"""The control groups that this process is in: where Linux and containers write down what it may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def directories(controller: str, *, root: Path = Path("/")) -> Iterator[Path]:
    """The process's groups for a controller (`cpu`, `memory`), from its own up to the root's: each level's limit counts.

    Version 2 has one hierarchy, version 1 one per controller; a hybrid machine has both, and both are given. `root` is where `/proc` and
    `/sys` are looked for. A container often sees its own group mounted as the root, so a path that isn't there is tried from its ancestors.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = mounts
        elif controller in controllers.split(","):
            base = mounts / controller if (mounts / controller).is_dir() else mounts / controllers
        else:
            continue
        group = base / path.strip("/")
        for directory in (group, *group.parents):
            if directory.is_dir():
                yield directory
            if directory == base:
                break


def read_number(path: Path) -> int | None:
    """The integer that a file holds; None where there is no such file, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
