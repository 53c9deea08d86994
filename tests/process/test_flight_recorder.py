"""The flight recorder over real processes: what only the scheduler saw is told, of live requests and of ended ones."""

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from process.test_endings import open_stream, read_until
from running_server import RunningServer, running_server, until
from sterna.cli.trace import run

SECRET = "a prompt that nobody but its sender may see. "


@pytest.fixture(scope="module")
def tight_server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Memory for a few requests; prompts in chunks."""
    flags = ["--executor", "scripted", "--executor-options", "step_ms=1", "--max-total-tokens", "1024", "--chunked-prefill-size", "64"]
    with running_server(byte_model, *flags, "--flight-recorder", "64", log=tmp_path_factory.mktemp("tight") / "log") as server:
        yield server


def traces(server: RunningServer, rid: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/v1/requests/{rid}")
    assert answer.status_code == 200, answer.text
    assert "nobody but" not in answer.text
    found: list[dict[str, Any]] = answer.json()["requests"]
    return found


def count(trace: dict[str, Any], stage: str) -> int:
    return sum(event["stage"] == stage for event in trace["events"])


def test_chunks_retractions_and_every_stage_are_told_in_order(tight_server: RunningServer) -> None:
    def ask(index: int) -> None:
        body = {"model": "bytes", "prompt": f"{index} {SECRET * 2}", "max_tokens": 200, "ignore_eos": True, "rid": f"tight-{index}"}
        assert tight_server.post("/v1/completions", body).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    found = [trace for index in range(8) for trace in traces(tight_server, f"tight-{index}")]
    assert len(found) == 8
    retracted = [trace for trace in found if trace["retractions"]]
    assert retracted, "memory was not short"
    for trace in found:
        assert (trace["state"], trace["outcome"], trace["finish_reason"], trace["output_tokens"]) == ("finished", "ok", "length", 200)
        assert count(trace, "retracted") == count(trace, "readmitted") == trace["retractions"]
        assert count(trace, "prefill_chunk") == trace["chunks"] >= 2
        order = [event["stage"] for event in trace["events"]]
        once = ["received", "tokenized", "dispatched", "scheduler_received", "first_scheduled", "first_token", "last_token"]
        once += ["detokenized", "first_byte", "finished"]
        assert [stage for stage in order if stage in once] == once
    console = Console(file=io.StringIO(), width=100, color_system=None)
    run([retracted[0]["rid"], "--url", tight_server.url], console)
    assert isinstance(console.file, io.StringIO)
    picture = console.file.getvalue()
    assert all(span in picture for span in ("queue", "prefill", "decode", "retracted", "last text"))
    assert "nobody but" not in picture


def test_a_live_request_says_where_it_is_and_its_end_why_it_came(tight_server: RunningServer) -> None:
    with closing(open_stream(tight_server, {"rid": "live", "prompt": SECRET, "max_tokens": 900})) as stream:
        read_until(stream, b"data: ")
        (trace,) = traces(tight_server, "live")
        assert (trace["state"], trace["scheduler_state"], trace["outcome"]) == ("running", "running", None)
        assert trace["prompt_tokens"] == len(SECRET)
        assert count(trace, "prefill_chunk") == count(trace, "first_token") == 1
        assert count(trace, "finished") == 0
        listed = httpx.get(f"{tight_server.url}/v1/requests?state=live").json()["data"]
        assert [each["rid"] for each in listed] == ["live"]
    (trace,) = until(lambda: [trace for trace in traces(tight_server, "live") if trace["state"] == "finished"], 10)
    assert (trace["outcome"], trace["abort_cause"]) == ("abort", "client_gone")
    assert tight_server.metrics()['sterna_aborts_total{cause="client_gone"}'] >= 1


def test_a_member_of_a_list_is_found_by_its_own_name_through_a_real_path(tight_server: RunningServer) -> None:
    assert tight_server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "rid": "list"}).status_code == 200
    assert [trace["rid"] for trace in traces(tight_server, "list")] == ["list 0", "list 1"]
    assert [trace["rid"] for trace in traces(tight_server, "list%201")] == ["list 1"]


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_replay_and_the_restart_before_it_are_told_with_their_cause(byte_model: Path, tmp_path: Path, victim: str) -> None:
    flags = ["--executor", "scripted", "--executor-options", "step_ms=5"]
    with running_server(byte_model, *flags, log=tmp_path / "log") as server:
        with closing(open_stream(server, {"rid": "survivor", "max_tokens": 100})) as stream:
            read_until(stream, b"data: ")
            os.kill(server.children()[victim], signal.SIGKILL)
            read_until(stream, b"[DONE]")
        (trace,) = until(lambda: [trace for trace in traces(server, "survivor") if trace["state"] == "finished"], 10)
        assert (trace["outcome"], trace["replays"], trace["output_tokens"]) == ("ok", 1, 100)
        (replayed,) = [event for event in trace["events"] if event["stage"] == "replayed"]
        assert replayed["cause"] == f"{victim}_died"
        assert 0 < replayed["tokens"] < 100
        assert count(trace, "scheduler_received") == count(trace, "first_scheduled") == 2
        assert count(trace, "first_token") == 1
        samples = server.metrics()
        assert samples[f'sterna_process_restarts_total{{cause="signal",process="{victim}"}}'] == 1
        assert samples[f'sterna_replays_total{{cause="{victim}_died"}}'] == 1
        console = Console(file=io.StringIO(), width=100, color_system=None)
        run(["survivor", "--url", server.url], console)
        assert isinstance(console.file, io.StringIO)
        assert all(span in console.file.getvalue() for span in ("replay", "recompute", "1 replay"))
