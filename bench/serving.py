"""Start a Sterna server of this checkout, drive it with `loadgen.py`, and read what both cost.

Used by `run.py`; nothing here depends on what is being measured.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOADGEN = Path(__file__).with_name("loadgen.py")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A running server and the CPU time of its process tree."""

    def __init__(self, process: subprocess.Popen[str], url: str, ready_s: float) -> None:
        self.process = process
        self.url = url
        self.ready_s = ready_s

    def pids(self) -> dict[int, str]:
        """The server's own process and its children, by name."""
        found = {self.process.pid: "server"}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid:
                    words = (stat.parent / "cmdline").read_text().split("\0")
                    found[int(stat.parent.name)] = next((word.split(".")[1] for word in words if word.startswith("sterna.")), "other")
            except (OSError, IndexError):
                continue
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by process name."""
        used: dict[str, float] = {}
        for pid, name in self.pids().items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        return used

    def proportional_set_mb(self) -> dict[str, float]:
        """Proportional set size by process name, in MB."""
        return {
            name: int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1]) / 1024
            for pid, name in self.pids().items()
        }


@contextmanager
def serving(*flags: str, port: int = 8917) -> Iterator[Server]:
    """A server of this checkout, ready."""
    began = time.monotonic()
    command = [sys.executable, "-m", "sterna", "serve", "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if " is ready after " in line:
                break
        else:
            raise SystemExit(f"the server did not start: {' '.join(command)}")
        yield Server(process, f"http://127.0.0.1:{port}", time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def drive(server: Server, model: str, *flags: str) -> dict[str, Any]:
    """One run of the load generator: its line of JSON, with the CPU seconds of each side beside it."""
    before_server = server.cpu_seconds()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run([sys.executable, str(LOADGEN), server.url, model, *flags], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures: dict[str, Any] = json.loads(out.stdout)
    figures["loadgen_cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
    figures["server_cpu_s"] = {name: round(used - before_server.get(name, 0.0), 2) for name, used in server.cpu_seconds().items()}
    return figures
