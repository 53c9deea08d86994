"""However a request ends, it ends once and frees what it held; however a process ends, the group doesn't outlive it."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from running_server import PROMPTLY_S, RunningServer, running_server, until

PROMPT = "echo me until I hang up. "


def idle(server: RunningServer) -> bool:
    """The scheduler holds nothing, and the server nothing of it."""
    names = ("sterna_requests_running", "sterna_scheduler_running", "sterna_scheduler_waiting", "sterna_kv_used_tokens")
    samples = server.metrics()
    return all(samples[name] == 0 for name in names)


def went_to_the_end(server: RunningServer) -> float:
    """Requests so far that nobody ended but they themselves."""
    return server.metrics()['sterna_requests_total{outcome="ok"}']


def open_stream(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A raw connection that has sent a streaming request: the test decides when it goes."""
    data = json.dumps({"model": "bytes", "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True} | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    connection.settimeout(PROMPTLY_S)
    seen = b""
    while marker not in seen:
        chunk = connection.recv(65536)
        assert chunk, seen
        seen += chunk
    return seen


def drop_at_once(server: RunningServer) -> None:
    open_stream(server, {}).close()


def drop_after_the_first_token(server: RunningServer) -> None:
    connection = open_stream(server, {})
    read_until(connection, b"data: ")
    connection.close()


def drop_while_waiting(server: RunningServer) -> None:
    """More streams than run at once; the last one is queued when it goes."""
    streams = [open_stream(server, {}) for _ in range(4)]
    for stream in streams:
        read_until(stream, b"data: ")
    queued = open_stream(server, {})
    until(lambda: server.metrics()["sterna_scheduler_waiting"] == 1)
    queued.close()
    until(lambda: server.metrics()["sterna_scheduler_waiting"] == 0)
    assert server.metrics()["sterna_scheduler_running"] == 4
    for stream in streams:
        stream.close()


def drop_after_the_last_token_unread(server: RunningServer) -> None:
    connection = open_stream(server, {"max_tokens": 3})
    until(lambda: idle(server))
    connection.close()


def drop_without_streaming(server: RunningServer) -> None:
    connection = open_stream(server, {"stream": False})
    until(lambda: server.metrics()["sterna_scheduler_running"] == 1)
    connection.close()


@pytest.mark.parametrize(
    "drop",
    [drop_at_once, drop_after_the_first_token, drop_while_waiting, drop_after_the_last_token_unread, drop_without_streaming],
)
def test_a_client_that_goes_leaves_nothing_behind(slow_server: RunningServer, drop: Callable[[RunningServer], None]) -> None:
    until(lambda: idle(slow_server))
    before = went_to_the_end(slow_server)
    drop(slow_server)
    until(lambda: idle(slow_server))
    assert went_to_the_end(slow_server) - before <= (drop is drop_after_the_last_token_unread)
    answer = slow_server.post("/v1/completions", {"model": "bytes", "prompt": PROMPT, "max_tokens": 10})
    assert answer.json()["choices"][0]["text"] == PROMPT[:10]


def test_dropping_one_stream_touches_no_other(slow_server: RunningServer) -> None:
    def survivor(index: int) -> str:
        body = {"model": "bytes", "prompt": f"{index} {PROMPT}", "max_tokens": 200, "ignore_eos": True}
        return str(slow_server.post("/v1/completions", body).json()["choices"][0]["text"])

    before = went_to_the_end(slow_server)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(survivor, index) for index in range(2)]
        for _ in range(10):
            drop_after_the_first_token(slow_server)
        for index, future in enumerate(futures):
            prompt = f"{index} {PROMPT}"
            assert future.result() == (prompt * 20)[:200]
    until(lambda: idle(slow_server))
    assert went_to_the_end(slow_server) - before == 2


def test_outcomes_reconcile(slow_server: RunningServer) -> None:
    until(lambda: idle(slow_server))
    samples = slow_server.metrics()
    ended = sum(value for name, value in samples.items() if name.startswith("sterna_requests_total{"))
    assert ended > 0
    assert ended == samples["sterna_requests_started_total"]


def test_an_abort_by_rid_ends_exactly_that_one(slow_server: RunningServer) -> None:
    streams = {rid: open_stream(slow_server, {"rid": rid}) for rid in ("req-1", "req-10")}
    for stream in streams.values():
        read_until(stream, b"data: ")
    assert slow_server.post("/abort_request", {"rid": "req-1"}).status_code == 200
    tail = read_until(streams["req-1"], b"\r\n0\r\n")
    assert tail.count(b'"finish_reason":"abort"') == 1
    assert b"data: [DONE]" in tail
    assert b'"error"' not in tail
    until(lambda: slow_server.metrics()["sterna_scheduler_running"] == 1)
    assert slow_server.post("/v1/completions", {"model": "bytes", "prompt": "x", "max_tokens": 1, "rid": "req-10"}).status_code == 400
    assert slow_server.post("/v1/completions", {"model": "bytes", "prompt": "x", "max_tokens": 1, "rid": "req-1"}).status_code == 200
    streams["req-10"].close()
    streams["req-1"].close()
    until(lambda: idle(slow_server))


def scripted(model: Path, log: Path, *flags: str) -> Any:
    """What it serves takes longer than `PROMPTLY_S`, 4,000 tokens do, and so does its patience: what ends sooner has been ended."""
    flags = ("--executor", "scripted", "--executor-options", "step_ms=20", "--drain-timeout", "600", *flags)
    return running_server(model, *flags, log=log)


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_child_is_told_to_every_client_and_ends_the_group(byte_model: Path, tmp_path: Path, victim: str) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        children = server.children()
        assert set(children) == {"scheduler", "detokenizer"}
        faults: list[Exception] = []

        def consume() -> None:
            with server.openai() as client:
                try:
                    for _ in client.completions.create(model="bytes", prompt=PROMPT, max_tokens=4000, stream=True):
                        started.release()
                except openai.APIError as fault:
                    faults.append(fault)

        started = threading.Semaphore(0)
        threads = [threading.Thread(target=consume) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            started.acquire()
        os.kill(children[victim], signal.SIGKILL)
        assert server.process.wait(PROMPTLY_S) == 1
        for thread in threads:
            thread.join(PROMPTLY_S)
        assert len(faults) == 3
        assert f"the {victim} process died" in server.read_log()
        for pid in children.values():
            until(lambda pid=pid: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_text())


def test_a_killed_parent_leaves_no_orphan(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        children = server.children()
        server.process.kill()
        server.process.wait()
        for pid in children.values():
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


def test_sigterm_refuses_new_work_and_lets_streams_finish(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        stream = open_stream(server, {"max_tokens": 150})
        read_until(stream, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        refused = server.post("/v1/completions", {"model": "bytes", "prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        with stream:
            seen = read_until(stream, b"[DONE]")
        assert b'"finish_reason":"length"' in seen
        assert server.process.wait(PROMPTLY_S) == 0


def test_a_sigterm_to_every_process_of_the_group_drains_as_one_to_the_parent(byte_model: Path, tmp_path: Path) -> None:
    """As service managers send it."""
    with scripted(byte_model, tmp_path / "log") as server:
        stream = open_stream(server, {"max_tokens": 50})
        read_until(stream, b"data: ")
        for pid in (*server.children().values(), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        with stream:
            seen = read_until(stream, b"[DONE]")
        assert b'"finish_reason":"length"' in seen
        assert server.process.wait(PROMPTLY_S) == 0


def test_a_child_that_dies_while_draining_ends_what_is_left_at_once(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        stream = open_stream(server, {"max_tokens": 4000})
        read_until(stream, b"data: ")
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        os.kill(children["scheduler"], signal.SIGKILL)
        with stream:
            assert b"engine_dead" in read_until(stream, b'"error"') + stream.recv(65536)
        assert server.process.wait(PROMPTLY_S) == 1


def test_what_outlives_the_drain_timeout_ends_with_an_error_event(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log", "--drain-timeout", "0.3") as server:
        stream = open_stream(server, {"max_tokens": 4000})
        read_until(stream, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        with stream:
            seen = read_until(stream, b'"error"')
        assert b"draining" in seen
        assert server.process.wait(PROMPTLY_S) == 0


def test_a_second_signal_ends_the_drain(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        stream = open_stream(server, {"max_tokens": 4000})
        read_until(stream, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PROMPTLY_S) == 0
        stream.close()


def test_no_socket_listens_beyond_loopback(fast_server: RunningServer) -> None:
    pids = [fast_server.process.pid, *fast_server.children().values()]
    listening = []
    for pid in pids:
        inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    listening.append(fields[1])
    assert listening == [f"0100007F:{fast_server.port:04X}"]
