"""The comparison's course: turns, absences, and nothing left running."""

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ceilings
import processes
from cases import CASES, Case
from peers.base import Absent, HttpRunning, Peer, Running, start_http
from peers.compare import compare
from peers.environment import Environment

NAP = "import sys; sys.stdin.read()"
"""A process that stays until its input is closed or it is ended."""


class _Idle(Running):
    def __init__(self, peer: "_Fake") -> None:
        super().__init__(subprocess.Popen([sys.executable, "-c", NAP], stdin=subprocess.PIPE, text=True), 0.5)
        self._peer = peer

    def measure(self, case: Case, seed: int) -> dict[str, Any]:
        self._peer.log.append((self._peer.name, case.name, seed))
        if self._peer.name == self._peer.fails:
            raise RuntimeError("a request failed")
        return {"wall_s": 100.0, "out_tok_s": 10.0, "prompt_tok_s": 20.0}

    def stop(self) -> None:
        super().stop()
        self._peer.stopped += 1


class _Fake(Peer):
    settings = "none"

    def __init__(self, name: str, log: list[tuple[str, str, int]], *, fails: str = "", absent: bool = False) -> None:
        self.name, self.log, self.fails, self._absent = name, log, fails, absent
        self.started: list[_Idle] = []
        self.stopped = 0

    def install(self) -> None:
        if self._absent:
            raise Absent("no such package")

    def start(self) -> Running:
        self.started.append(_Idle(self))
        return self.started[-1]

    def installed_mb(self) -> float:
        return 1.0

    def version(self) -> str:
        return "0"


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", dict)


def test_all_take_turns_and_the_one_that_fails_is_absent_while_the_rest_goes_on(tmp_path: Path) -> None:
    log: list[tuple[str, str, int]] = []
    peers = [_Fake("Sterna", log), _Fake("b", log, fails="b"), _Fake("c", log), _Fake("d", log, absent=True)]
    found = compare(list(peers), 2, False, tmp_path / "sub" / "out.json")
    assert found["absent"] == {"b": "a request failed", "d": "no such package"}
    assert set(found["systems"]) == {"Sterna", "b", "c"}
    warm_up, measured = 2 * len(CASES) + 1, [name for name, case, _ in log if case == "1 stream"]
    assert len(log) == warm_up + 2 * 2 * len(CASES)
    assert measured[-4:] == ["Sterna", "c", "c", "Sterna"]
    seeds = [seed for *_, seed in log[warm_up:]]
    assert seeds[::2] == seeds[1::2], "all get the same prompts in a turn"
    assert len(set(seeds)) == len(seeds) // 2, "and new ones in the next"
    for name in ("Sterna", "c"):
        assert [len(runs) for runs in found["systems"][name]["runs"].values()] == [2] * len(CASES)
        assert found["systems"][name]["ready_s"] == [0.5, 0.5], "the first start isn't counted"
    for peer in peers:
        assert peer.stopped == len(peer.started)
        assert all(running.process.poll() is not None for running in peer.started)
    assert json.loads((tmp_path / "sub" / "out.json").read_text()) == found


def test_an_interrupted_comparison_stops_what_it_started(tmp_path: Path) -> None:
    peer = _Fake("Sterna", [])

    def interrupted() -> str:
        raise KeyboardInterrupt

    second = _Fake("b", [])
    second.start = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        compare([peer, second], 1, True, tmp_path / "out.json")
    assert peer.started
    assert all(running.process.poll() is not None for running in peer.started)


def test_stopping_a_process_ends_what_it_started_too() -> None:
    start_child = f"child = subprocess.Popen([sys.executable, '-c', {NAP!r}], stdin=subprocess.PIPE)"
    script = f"import subprocess, sys; {start_child}; print(child.pid, flush=True); {NAP}"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert processes.tree(process.pid) == [process.pid, child]
    assert processes.tree_memory_mb(process.pid) > processes.proportional_set_mb(process.pid)
    ended = os.pidfd_open(child)
    try:
        processes.stop(process)
        assert process.poll() is not None
        assert select.select([ended], [], [], 10)[0], "a process's descriptor is readable once it has ended"
    finally:
        os.close(ended)


def test_a_server_that_ends_at_its_start_is_absent_with_the_last_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(Absent, match="no such model"):
        start_http(command, {}, 9, tmp_path / "log", 60)


def test_a_server_is_ready_once_it_answers(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("{}")
    script = (
        "import functools, http.server, sys; "
        "handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[2]); "
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), handler).serve_forever()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    running = start_http([sys.executable, "-c", script, str(port), str(tmp_path)], {}, port, tmp_path / "log", 60)
    assert isinstance(running, HttpRunning)
    assert 0 < running.ready_s < 60
    running.stop()
    assert running.process.poll() is not None


def test_an_environment_counts_as_made_only_whole_and_by_the_same_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_BENCH_DIR", str(tmp_path))
    made = Environment("peer", "version 1")
    packages = made.folder / "lib" / "python3" / "site-packages"
    for name in ("pip", "pip-23.2.dist-info", "thing"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_bytes(b"x = 1\n" * 1000)
    (made.folder / "bin").mkdir()
    made.python.symlink_to(sys.executable)
    (made.folder / "bin" / "pip3").write_bytes(b"x" * 1000)
    assert not made.is_made()
    assert made.installed_mb() == 0.006, "neither pip nor the interpreter counts"
    made.finish()
    assert made.is_made()
    assert made.installed_mb() > 0.006, "bytecode counts"
    assert not Environment("peer", "version 2").is_made()
    with pytest.raises(Absent, match="no-such-command"):
        made.pip("no-such-command")
    assert not made.is_made()
