"""Sterna itself, from this checkout; its installed size from an environment that holds its core and nothing else."""

from __future__ import annotations

import importlib.metadata
import subprocess

import serving
from peers.base import BENCH, MODEL, Absent, HttpRunning, Peer
from peers.environment import Environment

PORT = 8917


class Sterna(Peer):
    name = "Sterna"

    def __init__(self, flags: list[str]) -> None:
        self._flags = flags
        self._environment = Environment("sterna", f"core of {_commit()}")
        self.settings = " ".join(["sterna serve", MODEL, *flags])

    def install(self) -> None:
        made = self._environment
        # "dirty" names no state in particular.
        if not made.is_made() or _commit().endswith("-dirty"):
            made.begin()
            made.pip("install", str(BENCH.parent))
            made.finish()

    def start(self) -> HttpRunning:
        try:
            server = serving.start(MODEL, *self._flags, port=PORT)
        except RuntimeError as fault:
            raise Absent(str(fault)) from fault
        return HttpRunning(server.process, server.ready_s, server.url)

    def installed_mb(self) -> float:
        return self._environment.installed_mb()

    def version(self) -> str:
        return f"{importlib.metadata.version('sterna')} ({_commit()})"


def _commit() -> str:
    command = ["git", "-C", str(BENCH.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
