"""More than the server takes, longer than it waits, and dropped in every state: real processes, limits of two."""

import contextlib
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from process.test_endings import PROMPT, idle, open_stream, read_until
from running_server import RunningServer, running_server, until

KEYS = {"STERNA_ADMIN_API_KEY": "key-of-the-admin"}
ADMIN = {"Authorization": "Bearer key-of-the-admin"}


@pytest.fixture(scope="module")
def limited(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--executor", "scripted", "--executor-options", "step_ms=5,threaded=1,overlap=1", "--schedule-policy", "priority"]
    flags += ["--max-running-requests", "2", "--max-queued-requests", "2", "--waiting-timeout", "20", "--running-timeout", "60"]
    with running_server(byte_model, *flags, log=tmp_path_factory.mktemp("limited") / "log", env=KEYS) as server:
        yield server


def ask(server: RunningServer, **body: Any) -> httpx.Response:
    return server.post("/v1/completions", {"model": "bytes", "prompt": PROMPT, "max_tokens": 10, "ignore_eos": True} | body)


def fill(server: RunningServer) -> list[Any]:
    """Two streams that run until they are closed, and two that wait."""
    until(lambda: idle(server))
    streams = [open_stream(server, {"rid": f"r{index}", "max_tokens": 4000}) for index in range(2)]
    for stream in streams:
        read_until(stream, b"data: ")
    streams += [open_stream(server, {"rid": f"q{index}", "max_tokens": 5}) for index in range(2)]
    until(lambda: server.metrics()["sterna_scheduler_waiting"] == 2)
    return streams


def test_a_burst_far_past_the_limits_is_answered_to_the_last_request(limited: RunningServer) -> None:
    until(lambda: idle(limited))
    barrier = threading.Barrier(24)

    def one(index: int) -> tuple[int, bool, str]:
        barrier.wait()
        answer = ask(limited, stream=index % 2 == 0)
        return answer.status_code, "retry-after" in answer.headers, answer.text

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, range(24)))
    statuses = Counter(status for status, _, _ in answers)
    assert statuses.keys() == {200, 429}
    assert statuses[200] >= 4
    assert all(retry_after == (status == 429) for status, retry_after, _ in answers)
    assert all('"queue_full"' in text for status, _, text in answers if status == 429)
    until(lambda: idle(limited), 5)


def test_a_higher_priority_takes_a_queued_place_and_goes_first(limited: RunningServer) -> None:
    streams = fill(limited)
    high = open_stream(limited, {"rid": "high", "max_tokens": 5, "priority": 9})
    assert b"429" in read_until(streams[3], b'"queue_full"').splitlines()[0]
    assert ask(limited).status_code == 429
    streams[0].close()
    read_until(high, b"[DONE]")
    for stream in streams:
        stream.close()
    high.close()
    until(lambda: idle(limited), 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_waiting_request_with_504_and_a_running_one_too(limited: RunningServer, stream: bool) -> None:
    streams = fill(limited)
    streams.pop().close()
    until(lambda: limited.metrics()["sterna_scheduler_waiting"] == 1)
    waiting = ask(limited, timeout=0.2, stream=stream)
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
    for each in streams:
        each.close()
    until(lambda: idle(limited), 5)
    running = ask(limited, timeout=0.3, max_tokens=3000, stream=stream)
    if stream and running.status_code != 200:  # so slow a machine that nothing came in that time
        running = ask(limited, timeout=5, max_tokens=3000, stream=stream)
    if stream:
        assert running.status_code == 200
        *_, last = (json.loads(line[6:]) for line in running.text.splitlines() if line.startswith("data: "))
        assert last["error"]["code"] == "deadline_exceeded"
        text = "".join(re.findall(r'"text":"([^"]*)"', running.text))
        assert last["usage"]["completion_tokens"] == len(text) > 0
        assert (PROMPT * 200).startswith(text)
    else:
        assert (running.status_code, running.json()["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: idle(limited), 2)
    assert ask(limited).json()["choices"][0]["text"] == PROMPT[:10]


def test_many_drops_at_any_stage_leave_nothing_behind(limited: RunningServer) -> None:
    until(lambda: idle(limited))
    rng = random.Random(3)

    def drop(seed: int) -> None:
        stream = open_stream(limited, {"prompt": [PROMPT] * (1 + seed % 3), "stream": seed % 4 > 0})
        if seed % 2:
            stream.settimeout(rng.random() * 0.05)
            with contextlib.suppress(TimeoutError):
                stream.recv(1 + seed)
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drop, range(200)))
    until(lambda: idle(limited), 5)
    assert ask(limited).json()["choices"][0]["text"] == PROMPT[:10]


def test_all_requests_are_the_admin_s_to_end(limited: RunningServer) -> None:
    streams = fill(limited)
    assert limited.post("/abort_request", {"abort_all": True}).status_code == 401
    assert limited.post("/abort_request", {"abort_all": True}, headers=ADMIN).json() == {"aborted": 4}
    for stream in streams:
        assert read_until(stream, b"[DONE]").count(b'"finish_reason":"abort"') == 1
        stream.close()
    until(lambda: idle(limited), 2)


def test_no_key_is_in_the_log_nor_in_a_child(limited: RunningServer) -> None:
    assert limited.post("/flush_cache", None, headers=ADMIN).status_code == 200
    assert limited.post("/flush_cache", None, headers={"Authorization": "Bearer key-of-nobody"}).status_code == 401
    assert "key-of" not in limited.read_log()
    for pid in limited.children().values():
        for name in ("environ", "cmdline"):
            assert b"key-of" not in Path(f"/proc/{pid}/{name}").read_bytes()
