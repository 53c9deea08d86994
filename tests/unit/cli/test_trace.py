"""`sterna trace`: the picture shows every span in its lane, to scale, and nothing that a terminal obeys."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sterna.cli.timeline import bar_of, draw, show_ms, spans_of
from sterna.cli.trace import run
from sterna.errors import StartupError

Step = tuple[str, str, float]

USUAL: tuple[Step, ...] = (
    ("server", "received", 0),
    ("server", "templated", 1),
    ("server", "tokenized", 3),
    ("server", "dispatched", 4),
    ("scheduler", "scheduler_received", 5),
    ("scheduler", "first_scheduled", 10),
    ("scheduler", "prefill_chunk", 20),
    ("scheduler", "prefill_chunk", 30),
    ("scheduler", "first_token", 30),
    ("server", "first_byte", 31),
    ("scheduler", "last_token", 90),
    ("detokenizer", "detokenized", 92),
    ("server", "finished", 100),
)


def trace_of(steps: tuple[Step, ...], **fields: Any) -> dict[str, Any]:
    events = [{"process": process, "stage": stage, "at_ms": at} for process, stage, at in steps]
    known = {"rid": "r", "route": "/generate", "stream": True, "state": "finished", "outcome": "ok", "finish_reason": "stop", "code": None}
    counts = {
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "output_tokens": 9,
        "max_new_tokens": 64,
        "chunks": 2,
        "retractions": 0,
        "replays": 0,
    }
    return {**known, **counts, "abort_cause": None, "scheduler_state": None, "duration_ms": 100.0, "events": events, **fields}


def lanes(trace: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    return [(span.process, span.name, span.begin, span.end) for span in spans_of(trace)]


def drawn(trace: dict[str, Any], width: int = 100, ascii_only: bool = False) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(draw(trace, width=width, ascii_only=ascii_only))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_request_is_spans_in_three_lanes() -> None:
    assert lanes(trace_of(USUAL)) == [
        ("server", "template", 0, 1),
        ("server", "tokenize", 1, 3),
        ("server", "dispatch", 3, 4),
        ("server", "wait", 4, 31),
        ("server", "answer", 31, 100),
        ("scheduler", "queue", 5, 10),
        ("scheduler", "prefill", 10, 30),
        ("scheduler", "decode", 30, 90),
        ("detokenizer", "last text", 90, 92),
    ]


def test_a_retraction_and_a_replay_show_what_they_cost() -> None:
    trouble = (
        *USUAL[:10],
        ("scheduler", "retracted", 40.0),
        ("scheduler", "readmitted", 50.0),
        ("scheduler", "prefill_chunk", 55.0),
        ("server", "replayed", 60.0),
        ("scheduler", "scheduler_received", 70.0),
        ("scheduler", "first_scheduled", 71.0),
        ("scheduler", "prefill_chunk", 75.0),
        ("scheduler", "last_token", 90.0),
    )
    assert [lane[1:] for lane in lanes(trace_of(trouble)) if lane[0] == "scheduler"] == [
        ("queue", 5, 10),
        ("prefill", 10, 30),
        ("decode", 30, 40),
        ("retracted", 40, 50),
        ("recompute", 50, 55),
        ("decode", 55, 60),
        ("replay", 60, 70),
        ("queue", 70, 71),
        ("recompute", 71, 75),
        ("decode", 75, 90),
    ]


@pytest.mark.parametrize(
    ("known", "open_spans"),
    [
        (1, {("server", "prepare")}),
        (4, {("server", "wait")}),
        (5, {("server", "wait"), ("scheduler", "queue")}),
        (7, {("server", "wait"), ("scheduler", "prefill")}),
        (10, {("server", "answer"), ("scheduler", "decode")}),
    ],
)
def test_what_a_live_request_is_doing_goes_on_to_now(known: int, open_spans: set[tuple[str, str]]) -> None:
    trace = trace_of(USUAL[:known], outcome=None, state="running")
    spans = spans_of(trace)
    assert {(span.process, span.name) for span in spans if span.is_open} == open_spans
    assert all(span.end == 100.0 for span in spans if span.is_open)
    assert drawn(trace).count("ms…") == len(open_spans)


def test_an_aborted_request_that_was_never_scheduled_is_drawn_too() -> None:
    steps = (*USUAL[:5], ("server", "reader_gone", 50.0), ("server", "aborted", 50.0), ("server", "finished", 60.0))
    text = drawn(trace_of(steps, outcome="abort", abort_cause="client_gone"))
    assert "abort: client_gone" in text
    assert "reader gone" in text
    assert "queue" in text


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200), st.booleans())
def test_a_bar_is_to_scale_and_never_invisible(first: float, second: float, cells: int, ascii_only: bool) -> None:
    begin, end = sorted((first, second))
    bar = bar_of(begin, end, cells, ascii_only)
    assert len(bar) == cells
    assert bar.strip()
    left, right = len(bar) - len(bar.lstrip()), len(bar.rstrip())
    assert left <= begin * cells + 1
    assert right >= end * cells - 1
    assert right - left <= (end - begin) * cells + 2
    assert " " not in bar.strip()
    assert not ascii_only or bar.isascii()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_fits_the_terminal(width: int) -> None:
    text = drawn(trace_of(USUAL), width)
    assert max(map(len, text.splitlines())) <= width
    if width > 40:
        assert "─" not in text
        assert all(word in text for word in ("template", "prefill", "decode", "last text", "40 prompt tokens (16 cached)", "0 replays"))


def test_a_terminal_without_unicode_gets_none() -> None:
    assert drawn(trace_of(USUAL, outcome=None, state="running"), ascii_only=True).isascii()


def test_no_server_can_command_the_terminal() -> None:
    text = drawn(trace_of(USUAL, rid="\x1b[31mr[bold]x", route="/\x1b]0;t\x07"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]x" in text


@pytest.mark.parametrize(
    ("ms", "shown"), [(0, "0.0 ms"), (9.94, "9.9 ms"), (83.4, "83 ms"), (999.4, "999 ms"), (2350, "2.35 s"), (720_000, "12 min")]
)
def test_a_duration_is_short_to_read(ms: float, shown: str) -> None:
    assert show_ms(ms) == shown


# ---- against a server ----


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Serves `answers` by path; also what was asked, and with which key."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            found = answers.get(self.path)
            body = json.dumps({"error": {"message": "no \x1b such"}} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", asked
        finally:
            http.shutdown()
            thread.join()


def test_a_rid_is_asked_for_exactly_and_with_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    members = {"rid": "li/st", "total": 70, "requests": [trace_of(USUAL, rid=f"li/st {i}") for i in range(2)]}
    with server({"/v1/requests/li%2Fst": members}) as (url, asked):
        assert run(["li/st", "--url", url, "--api-key", "k"]) == 0
        shown = capsys.readouterr().out
        assert run(["li/st", "--url", url, "--json"]) == 0
    assert asked[0] == ("/v1/requests/li%2Fst", "Bearer k")
    assert "li/st 0" in shown
    assert "li/st 1" in shown
    assert "and 68 more members" in shown
    assert json.loads(capsys.readouterr().out) == members


def test_without_a_rid_the_recent_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"data": [trace_of(USUAL, rid="a"), trace_of((), rid="b", outcome=None, state="queued", route=None)], "next_before": 3}
    path = "/v1/requests?limit=2&state=live"
    with server({path: listed, "/v1/requests?limit=20": {"data": [], "next_before": None}}) as (url, _):
        assert run(["--url", url, "--limit", "2", "--state", "live"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert run(["--url", url]) == 0
        assert "no such requests" in capsys.readouterr().out
    assert rows[1] == ["stop", "a", "/generate", "40", "16", "9", "100", "ms"]
    assert rows[2] == ["queued", "b", "40", "16", "9", "100", "ms…"]
    assert rows[3] == ["older", "ones:", "--limit"]


def test_the_list_is_asked_for_with_the_admins_key_and_a_request_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STERNA_ADMIN_API_KEY", "admin")
    monkeypatch.setenv("STERNA_API_KEY", "key")
    one = {"rid": "r", "total": 1, "requests": [trace_of(USUAL)]}
    with server({"/v1/requests?limit=20": {"data": [], "next_before": None}, "/v1/requests/r": one}) as (url, asked):
        assert run(["--url", url]) == run(["r", "--url", url]) == 0
    assert [key for _, key in asked] == ["Bearer admin", "Bearer key"]


def test_what_the_server_refuses_is_told_in_its_words() -> None:
    with server({}) as (url, _), pytest.raises(StartupError, match=r"^no  such$"):
        run(["r", "--url", url])


def test_no_server_is_told_with_its_address() -> None:
    with pytest.raises(StartupError, match=r"no server at http://127.0.0.1:1"):
        run(["--url", "http://127.0.0.1:1"])
