"""Start a Sterna server of this checkout, drive it with `loadgen.py`, and read what both cost.

Used by `run.py` and `peers/`; nothing here depends on what is being measured.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cases
import processes


class Server:
    """A running server and the CPU time of its process tree."""

    def __init__(self, process: subprocess.Popen[str], url: str, ready_s: float) -> None:
        self.process = process
        self.url = url
        self.ready_s = ready_s

    def pids(self) -> dict[int, str]:
        """The server's own process and its descendants, by name."""
        return {pid: "server" if pid == self.process.pid else _name(pid) for pid in processes.tree(self.process.pid)}

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by process name."""
        return {name: processes.cpu_seconds(pid) for pid, name in self.pids().items()}

    def proportional_set_mb(self) -> dict[str, float]:
        """Proportional set size by process name, in MB."""
        return {name: processes.proportional_set_mb(pid) for pid, name in self.pids().items()}


def _name(pid: int) -> str:
    """Which of Sterna's packages a child runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "gone"
    return next((word.split(".")[1] for word in words if word.startswith("sterna.")), "other")


def start(*flags: str, port: int = 8917, environment: Mapping[str, str] = MappingProxyType({})) -> Server:
    """A server of this checkout, ready. Raises RuntimeError where it ends before."""
    began = time.monotonic()
    command = [sys.executable, "-m", "sterna", "serve", "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True)
    for line in process.stdout:
        if " is ready after " in line:
            return Server(process, f"http://127.0.0.1:{port}", time.monotonic() - began)
    processes.stop(process)
    raise RuntimeError(f"the server did not start: {' '.join(command)}")


@contextmanager
def serving(*flags: str, port: int = 8917) -> Iterator[Server]:
    server = start(*flags, port=port)
    try:
        yield server
    finally:
        processes.stop(server.process)


def drive(server: Server, model: str, *flags: str) -> dict[str, Any]:
    """`cases.drive`, with the CPU seconds of each side beside it."""
    before_server = server.cpu_seconds()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = cases.drive(server.url, model, list(flags))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["loadgen_cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
    figures["server_cpu_s"] = {name: round(used - before_server.get(name, 0.0), 2) for name, used in server.cpu_seconds().items()}
    return figures
