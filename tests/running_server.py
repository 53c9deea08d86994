"""A real server in real processes, for tests under `process/` and `e2e/`."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).parents[1]


PROMPTLY_S = 60.0
"""Far above what takes a moment anywhere, on a machine that is busy with other things too, and far below a hang."""


def free_port() -> int:
    """Any of those that systems give to no outgoing connection: nothing else takes it before the server does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def until(condition: Callable[[], Any], timeout_s: float = PROMPTLY_S) -> Any:
    """Poll what another process owns until it is true; its value. Fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s"
        time.sleep(0.02)


class RunningServer:
    """`sterna serve` as a child of the test, its log in a file."""

    def __init__(self, model: Path | str, *flags: str, log: Path, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "sterna", "serve", str(model), "--port", str(self.port), *flags]
        environment = os.environ | (env or {})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [(env or {}).get("PYTHONPATH"), str(ROOT / "src")]))
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)

    def wait_ready(self) -> RunningServer:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.read_log()}"
            try:
                return self.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(ready)
        return self

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """Pids of the live child processes, by name (`scheduler`, `detokenizer`)."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                command = (stat.parent / "cmdline").read_text()
            except OSError:
                continue
            match = re.search(r"sterna\.(\w+)\.process", command)
            if match and int(fields[1]) == self.process.pid and fields[0] != "Z":
                found[match[1]] = int(stat.parent.name)
        return found

    def openai(self, **options: Any) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, http_client=http, **options)

    # Without `verify=False` each call reads all of the system's certificates, which takes longer than the request.

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PROMPTLY_S, verify=False)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=2 * PROMPTLY_S, verify=False, **options)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, by `name{labels}`."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def stop(self, timeout_s: float = PROMPTLY_S) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop:\n{self.read_log()}") from None


@contextmanager
def running_server(model: Path | str, *flags: str, log: Path, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """A ready server, stopped at the end whatever happens."""
    server = RunningServer(model, *flags, log=log, env=env)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()
