"""What a server must offer to be compared, and what those that speak HTTP share.

Standard library only: the peers' own environments import it too.
"""

from __future__ import annotations

import abc
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import cases
import processes
from cases import Case

BENCH = Path(__file__).parents[1]
MODEL = "smollm2"
POLL_S = 0.02


class Absent(Exception):
    """The peer can't be had, started or measured here; the message says why."""


class Running(abc.ABC):
    """A peer that is ready."""

    def __init__(self, process: subprocess.Popen[str], ready_s: float) -> None:
        self.process = process
        self.ready_s = ready_s
        """From the command to the first moment that it takes requests."""

    @abc.abstractmethod
    def measure(self, case: Case, seed: int) -> dict[str, Any]:
        """One run of the case: the load generator's figures. Raises RuntimeError where any request failed."""

    def stop(self) -> None:
        processes.stop(self.process)


class HttpRunning(Running):
    def __init__(self, process: subprocess.Popen[str], ready_s: float, url: str) -> None:
        super().__init__(process, ready_s)
        self.url = url

    def measure(self, case: Case, seed: int) -> dict[str, Any]:
        return cases.drive(self.url, MODEL, case.flags(seed))


class Peer(abc.ABC):
    """A server that can be compared."""

    name: str
    settings: str
    """How it runs here, and why that is its best."""

    @abc.abstractmethod
    def install(self) -> None:
        """Make its environment and its model, where they aren't there yet. Raises Absent."""

    @abc.abstractmethod
    def start(self) -> Running:
        """Raises Absent."""

    @abc.abstractmethod
    def installed_mb(self) -> float:
        """Everything that installing it put on disk, bytecode included, without pip, in MB."""

    @abc.abstractmethod
    def version(self) -> str: ...


def start_http(command: list[str], environment: dict[str, str], port: int, log: Path, limit_s: float) -> HttpRunning:
    """Run `command` until `/v1/models` answers on `port`. Raises Absent, with the log's end, where it ends before or takes too long."""
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    while not _answers(f"{url}/v1/models"):
        if process.poll() is not None:
            raise Absent(f"it ended with {process.returncode} at its start: {last_lines(log)}")
        if time.monotonic() - began > limit_s:
            processes.stop(process)
            raise Absent(f"it was not ready after {limit_s:.0f} s: {last_lines(log)}")
        time.sleep(POLL_S)
    return HttpRunning(process, time.monotonic() - began, url)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def last_lines(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]
