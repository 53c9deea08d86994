"""Sterna itself, from this checkout; its installed size from an environment that holds its core and nothing else."""

from __future__ import annotations

import socket
import subprocess

import serving
from peers.base import BENCH, MODEL, Absent, HttpRunning, Peer
from peers.environment import Environment


class Sterna(Peer):
    def __init__(self, flags: list[str], isa: str | None = None) -> None:
        """`isa`, where given, is the only instruction set that it may use (`STERNA_ISA`)."""
        self.name = f"Sterna {isa}" if isa else "Sterna"
        self._flags = flags
        self._forced = {"STERNA_ISA": isa} if isa else {}
        self._environment = Environment("sterna", f"core of {_commit()}")
        self.settings = " ".join([*(f"{key}={value}" for key, value in self._forced.items()), "sterna serve", MODEL, *flags])

    def install(self) -> None:
        made = self._environment
        # "dirty" names no state in particular.
        if not made.is_made() or _commit().endswith("-dirty"):
            made.begin()
            made.pip("install", str(BENCH.parent))
            made.finish()

    def start(self) -> HttpRunning:
        try:
            server = serving.start(MODEL, *self._flags, port=_free_port(), environment=self._forced)
        except RuntimeError as fault:
            raise Absent(str(fault)) from fault
        return HttpRunning(server.process, server.ready_s, server.url)

    def installed_mb(self) -> float:
        return self._environment.installed_mb()

    def version(self) -> str:
        return f"{self._environment.version('sterna')} ({_commit()})"


def _free_port() -> int:
    """Several of them may be up at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _commit() -> str:
    command = ["git", "-C", str(BENCH.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
