"""A process dies under streams: every client sees a pause, and then exactly the text that it would have had."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from running_server import PROMPTLY_S, RunningServer, running_server, until

STEPS = "step_ms=5,overlap=1,threaded=1"
POISON = "~"
"""Kills the scheduler when it would be sampled."""


def scripted(model: Path, log: Path, *flags: str, options: str = STEPS) -> Any:
    return running_server(model, "--executor", "scripted", "--executor-options", options, *flags, log=log)


@pytest.fixture(scope="module")
def server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One that lives through all that is done to it."""
    with scripted(byte_model, tmp_path_factory.mktemp("recovery") / "log", "--max-running-requests", "8") as server:
        yield server


def echo(prompt: str, tokens: int) -> str:
    data = prompt.encode()
    return (data * (tokens // len(data) + 1))[:tokens].decode(errors="replace")


class Client(threading.Thread):
    """One completion, streamed or not."""

    def __init__(self, server: RunningServer, prompt: str, tokens: int, *, stream: bool = True, **fields: Any) -> None:
        super().__init__()
        self._server = server
        self._body: dict[str, Any] = {"model": "bytes", "prompt": prompt, "max_tokens": tokens, "seed": 1, "extra_body": fields}
        self._stream = stream
        self.text = ""
        self.reasons: list[str | None] = []
        self.usage: Any = None
        self.fault: openai.APIError | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with self._server.openai() as client:
            try:
                if self._stream:
                    for chunk in client.completions.create(**self._body, stream=True, stream_options={"include_usage": True}):
                        self.usage = chunk.usage
                        for choice in chunk.choices:
                            self.text += choice.text
                            self.reasons.append(choice.finish_reason)
                        self.begun.set()
                else:
                    answer = client.completions.create(**self._body)
                    self.text, self.usage = answer.choices[0].text, answer.usage
                    self.reasons = [answer.choices[0].finish_reason]
            except openai.APIError as fault:
                self.fault = fault
            self.begun.set()

    def result(self) -> str:
        """The text, of a request that has come to its one end."""
        self.join(PROMPTLY_S)
        assert not self.is_alive()
        assert self.fault is None, self.fault
        assert [reason for reason in self.reasons if reason is not None] == [self.reasons[-1]]
        return self.text


def kill(server: RunningServer, victim: str) -> None:
    """kill -9, and wait until its successor serves."""
    restarts = f'sterna_process_restarts_total{{cause="signal",process="{victim}"}}'
    before = server.metrics()[restarts]
    os.kill(server.children()[victim], signal.SIGKILL)
    until(lambda: server.metrics()[restarts] > before)
    server.wait_ready()


def replays_of(server: RunningServer) -> float:
    return sum(value for name, value in server.metrics().items() if name.startswith("sterna_replays_total{"))


def idle(server: RunningServer) -> bool:
    names = ("sterna_requests_running", "sterna_scheduler_running", "sterna_scheduler_waiting", "sterna_kv_used_tokens")
    samples = server.metrics()
    return all(samples.get(name) == 0 for name in names)


HELD = "STO世 S界STO👩‍👩‍👧 "
"""Nearly all of it is the beginning of a stop, or of a character: whenever somebody dies, something is held back."""


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_after_a_kill_streams_go_on_where_they_were(server: RunningServer, victim: str) -> None:
    prompts = [f"{index} {HELD}" for index in range(6)]
    replays = replays_of(server)
    clients = [
        Client(server, prompt, 500, stream=index % 3 != 2, stop=["STOP", f"{index} no"], ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    until(lambda: server.metrics()["sterna_requests_running"] == len(clients))
    queued = [Client(server, f"queued {HELD}", 30) for _ in range(6)]  # more than run at once
    for client in clients[:2]:
        client.begun.wait(PROMPTLY_S)
    kill(server, victim)
    kill(server, victim)
    assert replays_of(server) >= replays + 2 * len(clients)
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.result() == echo(prompt, 500)
        assert (client.usage.prompt_tokens, client.usage.completion_tokens) == (len(prompt.encode()), 500)
    assert [client.result() for client in queued] == [echo(f"queued {HELD}", 30)] * 6
    until(lambda: idle(server))
    assert f"the {victim} process died (signal 9)" in server.read_log()
    assert set(server.children()) == {"scheduler", "detokenizer"}


def test_a_stop_that_had_begun_when_a_process_died_is_found_and_trimmed(server: RunningServer) -> None:
    """The stop is longer than all that is made between two kills: it is held back over several lives."""
    stop = "s" * 500
    prompt = "text, then " + stop + " and more"
    replays = replays_of(server)
    client = Client(server, prompt, 600, stop=stop)
    client.begun.wait(PROMPTLY_S)
    for victim in ("detokenizer", "scheduler"):
        kill(server, victim)
    assert replays_of(server) == replays + 2
    assert client.result() == "text, then "
    assert client.reasons[-1] == "stop"
    assert client.usage.completion_tokens == prompt.index(stop) + len(stop)


def test_streams_outlive_the_death_of_both_at_once(server: RunningServer) -> None:
    clients = [Client(server, f"{index} {HELD}", 300) for index in range(3)]
    for client in clients:
        client.begun.wait(PROMPTLY_S)
    for pid in server.children().values():
        os.kill(pid, signal.SIGKILL)
    for index, client in enumerate(clients):
        assert client.result() == echo(f"{index} {HELD}", 300)
    server.wait_ready()


def test_requests_that_come_while_the_engine_is_away_wait_for_it(server: RunningServer) -> None:
    os.kill(server.children()["scheduler"], signal.SIGKILL)
    until(lambda: httpx.get(server.url + "/ready").status_code == 503)
    assert httpx.get(server.url + "/ready").json() == {"status": "recovering"}
    assert httpx.get(server.url + "/health").status_code == 200
    assert Client(server, "hello", 5).result() == "hello"
    server.wait_ready()


def test_who_kills_the_engine_ends_alone_and_everyone_else_finishes(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log", options=f"{STEPS},crash_token={ord(POISON)}") as server:
        prompts = [f"innocent {index} {HELD}" for index in range(5)]
        innocents = [Client(server, prompt, 300) for prompt in prompts]
        for client in innocents:
            client.begun.wait(PROMPTLY_S)
        poisoned = Client(server, "the secret of my " + POISON, 30, rid="poisoned", temperature=0.25)
        later = Client(server, "innocent, and later", 30)
        for client, prompt in zip(innocents, prompts, strict=True):
            assert client.result() == echo(prompt, 300)
        assert later.result() == echo("innocent, and later", 30)
        poisoned.join(PROMPTLY_S)
        assert poisoned.fault is not None
        assert poisoned.fault.code == "engine_crashed"
        assert poisoned.text == "the secret of my "
        until(lambda: idle(server))
        log = server.read_log()
        [line] = [line for line in log.splitlines() if "poisoned: the scheduler died" in line]
        assert "temperature=0.25" in line
        assert "secret" not in log
        whole = server.post("/v1/completions", {"model": "bytes", "prompt": POISON, "max_tokens": 3})
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_crashed")


def test_an_engine_that_no_longer_starts_ends_the_server(byte_model: Path, tmp_path: Path) -> None:
    """Rather than being started for ever."""
    model = tmp_path / "model"
    model.mkdir()
    for path in byte_model.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    with scripted(model, tmp_path / "log") as server:
        client = Client(server, "hello", 4000)
        client.begun.wait(PROMPTLY_S)
        (model / "facts.json").unlink()
        os.kill(server.children()["scheduler"], signal.SIGKILL)
        assert server.process.wait(PROMPTLY_S) == 1
        client.join(PROMPTLY_S)
        assert client.fault is not None
        log = server.read_log()
        assert "giving up" in log
        assert len(re.findall("the scheduler process died", log)) == 6
        assert server.children() == {}


def test_streams_outlive_a_death_while_draining(byte_model: Path, tmp_path: Path) -> None:
    with scripted(byte_model, tmp_path / "log") as server:
        client = Client(server, HELD, 300)
        client.begun.wait(PROMPTLY_S)
        victim = server.children()["scheduler"]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(server.url + "/ready").status_code == 503)
        os.kill(victim, signal.SIGKILL)
        assert client.result() == echo(HELD, 300)
        assert server.process.wait(PROMPTLY_S) == 0


def test_an_abort_while_the_engine_is_away_ends_the_request_at_once_and_it_is_not_sent_again(server: RunningServer) -> None:
    client = Client(server, "hello", 4000, rid="mine")
    client.begun.wait(PROMPTLY_S)
    os.kill(server.children()["scheduler"], signal.SIGKILL)
    until(lambda: httpx.get(server.url + "/ready").status_code == 503)
    assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": 1}
    client.join(PROMPTLY_S)
    assert client.reasons[-1] == "abort"
    server.wait_ready()
    until(lambda: idle(server))


def test_health_and_readiness_answer_while_a_prompt_is_computed(byte_model: Path, tmp_path: Path) -> None:
    """One step of seconds: nobody's ill health."""
    flags = ["--chunked-prefill-size", "0"]
    with scripted(byte_model, tmp_path / "log", *flags, options="prefill_us_per_token=2000,threaded=1") as server:
        client = Client(server, "x" * 1500, 1, stream=False)
        until(lambda: server.metrics()["sterna_requests_running"] == 1)
        answers = 0
        while client.is_alive():
            for path in ("/health", "/ready"):
                assert httpx.get(server.url + path).status_code == 200
            answers += 1
        assert answers > 3
        assert client.result() == "x"


def gone(pid: int) -> bool:
    """Ended; perhaps nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# A step that takes longer than PROMPTLY_S: what ends sooner didn't wait for it.
LONG_STEP = "prefill_us_per_token=400000,threaded=1,overlap=1"
LONG_PROMPT = "x" * 300


@pytest.mark.parametrize("state", ["idle", "in a step", "stopped"])
def test_no_child_outlives_a_killed_parent(byte_model: Path, tmp_path: Path, state: str) -> None:
    with scripted(byte_model, tmp_path / "log", options=LONG_STEP if state == "in a step" else STEPS) as server:
        children = server.children().values()
        if state == "in a step":
            client = Client(server, LONG_PROMPT, 3)
            until(lambda: server.metrics()["sterna_requests_running"] == 1)
        for pid in children if state == "stopped" else ():
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        for pid in children:
            until(lambda pid=pid: gone(pid))
        if state == "in a step":
            client.join(PROMPTLY_S)


@pytest.mark.parametrize("reader", ["waits", "doesn't read"])
def test_a_second_signal_ends_everything_at_once(byte_model: Path, tmp_path: Path, reader: str) -> None:
    """Though a step takes long, and somebody doesn't read what he is sent."""
    waits = reader == "waits"
    flags = ["--sse-commit-after", "0", "--drain-timeout", "1000"]
    with scripted(byte_model, tmp_path / "log", *flags, options=LONG_STEP if waits else STEPS) as server:
        prompt = LONG_PROMPT if waits else HELD
        body = {"model": "bytes", "prompt": prompt, "max_tokens": 3700, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PROMPTLY_S):
            until(lambda: server.metrics()["sterna_requests_running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(server.url + "/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PROMPTLY_S) == 0
