"""Process trees as Linux accounts for them: who belongs to one, its CPU time, its memory, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
STOP_LIMIT_S = 60


def tree(root: int) -> list[int]:
    """The process `root` and all that descend from it, `root` first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found.extend(sorted(children.get(pid, ())))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of one process so far, and of its children that have ended; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / CLOCK_TICKS


def tree_cpu_seconds(root: int) -> float:
    return sum(cpu_seconds(pid) for pid in tree(root))


def proportional_set_mb(pid: int) -> float:
    """Proportional set size in MB (10^6 bytes): what the process has to itself, and its share of what it shares."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024 / 1e6


def tree_memory_mb(root: int) -> float:
    return sum(proportional_set_mb(pid) for pid in tree(root))


def machine_busy_seconds() -> float:
    """CPU time that the whole machine has spent on anything, over all cores."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / CLOCK_TICKS


def freeze(root: int) -> None:
    """Let the process and its descendants do nothing until `thaw`."""
    _signal_all(root, signal.SIGSTOP)


def thaw(root: int) -> None:
    _signal_all(root, signal.SIGCONT)


def _signal_all(root: int, number: signal.Signals) -> None:
    for pid in tree(root):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that we started and its descendants: asked first, killed after `STOP_LIMIT_S`."""
    descendants = {pid: _began(pid) for pid in tree(process.pid)[1:]}
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    for pid, began in descendants.items():
        if began is not None and _began(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _began(pid: int) -> str | None:
    """When the process started, in ticks since boot: tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
