"""A request's stages as a picture for the terminal: a lane per process, a bar per span. Reads the answer of `/v1/requests/{rid}`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sterna.cli.client import printable

Trace = dict[str, Any]
Event = dict[str, Any]

STYLES = {"server": "cyan", "scheduler": "magenta", "detokenizer": "green"}
STATE_STYLES = {"ok": "green", "error": "red", "abort": "yellow"}
FAULTS = frozenset({"aborted", "timeout", "replayed", "replay", "retracted", "reader_gone"})
"""Stages and spans that tell of trouble."""
MIN_BAR = 20
"""Cells; a narrower terminal wraps."""


class Span(NamedTuple):
    """Milliseconds after the request's arrival."""

    process: str
    name: str
    begin: float
    end: float
    is_open: bool = False
    """It goes on: the request lives."""
    waits: bool = False
    """Nothing is done for the request in it."""


def spans_of(trace: Trace) -> list[Span]:
    """What each process did when, lane by lane."""
    events = trace["events"]
    end = float(trace["duration_ms"])
    live = trace["outcome"] is None
    first = {event["stage"]: float(event["at_ms"]) for event in reversed(events)}
    return [*_server(first, end, live), *_scheduler(events, end, live), *_detokenizer(first)]


def _server(first: dict[str, float], end: float, live: bool) -> Iterator[Span]:
    """Each stage begins where the one before it ended; the one that is going on ends now."""
    begin = first.get("received", 0.0)
    for stage, name in _SERVER:
        at = first.get(stage)
        if at is not None:
            yield Span("server", name, begin, at, waits=name == "wait")
            begin = at
    if live:
        going = "answer" if "first_byte" in first else "wait" if "dispatched" in first else "prepare"
        yield Span("server", going, begin, end, is_open=True, waits=going == "wait")


_SERVER = (
    ("templated", "template"),
    ("tokenized", "tokenize"),
    ("dispatched", "dispatch"),
    ("first_byte", "wait"),
    ("finished", "answer"),
)
"""Stage -> what the server did until it was reached."""


def _scheduler(events: Sequence[Event], end: float, live: bool) -> Iterator[Span]:
    """Queue, prefill and decode, with what a retraction or a replay repeats."""
    name: str | None = None
    begin = computed = 0.0
    has_output = False
    for event in events:
        stage, at = event["stage"], float(event["at_ms"])
        if stage == "prefill_chunk":
            computed = at
            continue
        following = _AFTER.get(stage, "")
        if following == "":
            continue
        if stage in ("first_scheduled", "readmitted") and has_output:
            following = "recompute"
        has_output = has_output or stage == "first_token"
        if name is not None:
            yield from _parts(name, begin, at, computed)
        name, begin, computed = following, at, at
    if name is not None:
        yield from _parts(name, begin, end, computed, is_open=live)


_AFTER: dict[str, str | None] = {
    "scheduler_received": "queue",
    "first_scheduled": "prefill",
    "readmitted": "prefill",
    "first_token": "decode",
    "retracted": "retracted",
    "replayed": "replay",
    "last_token": None,
}
"""Stage -> what the scheduler does from then on; None is nothing."""


def _parts(name: str, begin: float, end: float, computed: float, is_open: bool = False) -> Iterator[Span]:
    """A recomputation ends with its last chunk, and what follows is the rest of the output."""
    if name == "recompute" and begin < computed < end:
        yield Span("scheduler", name, begin, computed)
        name, begin = "decode", computed
    yield Span("scheduler", name, begin, end, is_open, waits=name in ("queue", "retracted", "replay"))


def _detokenizer(first: dict[str, float]) -> Iterator[Span]:
    if "last_token" in first and "detokenized" in first:
        yield Span("detokenizer", "last text", first["last_token"], first["detokenized"])


# ---- drawing ----


def draw(trace: Trace, *, width: int, ascii_only: bool) -> RenderableType:
    """The whole picture, `width` cells wide."""
    return Group(_headline(trace), Text(), _lanes(trace, width, ascii_only), Text(), _events(trace["events"]))


def _headline(trace: Trace) -> Text:
    text = Text()
    text.append(printable(trace["rid"]), style="bold")
    text.append("  ")
    text.append(describe_state(trace))
    for part in (trace["route"], "stream" if trace["stream"] else None, show_ms(trace["duration_ms"])):
        if part:
            text.append(f"  {printable(part)}", style="dim")
    counts = [
        f"{_plural(trace['prompt_tokens'], 'prompt token')} ({trace['cached_tokens']} cached)",
        f"{trace['output_tokens']} of at most {_plural(trace['max_new_tokens'] or 0, 'output token')}",
    ]
    counts += [_plural(trace[field], word) for field, word in (("chunks", "chunk"), ("retractions", "retraction"), ("replays", "replay"))]
    text.append("\n" + ", ".join(counts))
    return text


def describe_state(trace: Trace) -> Text:
    """`stop`, `length`, the error's code, the abort's cause, or where a live request is."""
    if trace["outcome"] is None:
        return Text(trace.get("scheduler_state") or trace["state"], style="bold cyan")
    style = STATE_STYLES.get(trace["outcome"], "")
    if trace["outcome"] == "ok":
        return Text(trace["finish_reason"] or "ok", style=style)
    why = trace["abort_cause"] if trace["outcome"] == "abort" else trace["code"]
    return Text(f"{trace['outcome']}: {why}" if why else trace["outcome"], style=style)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _lanes(trace: Trace, width: int, ascii_only: bool) -> Table:
    spans = spans_of(trace)
    total = max([float(trace["duration_ms"]), *(span.end for span in spans)], default=0.0) or 1.0
    labels = max((len(span.name) for span in spans), default=0)
    cells = max(MIN_BAR, width - len("detokenizer") - labels - len("9999.9 ms") - 7)
    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    end = show_ms(total)
    grid.add_row("", "", Text("0" + end.rjust(cells - 1), style="dim"), "")
    lane = None
    for span in spans:
        style = STYLES[span.process]
        process = Text(span.process if span.process != lane else "", style=f"bold {style}")
        lane = span.process
        if span.waits:
            style = "yellow" if span.name in FAULTS else "dim"
        bar = Text(bar_of(span.begin / total, span.end / total, cells, ascii_only), style=style)
        took = show_ms(span.end - span.begin) + ("…" if span.is_open and not ascii_only else "")
        grid.add_row(process, Text(span.name, style=style if span.waits else ""), bar, took)
    return grid


def bar_of(begin: float, end: float, cells: int, ascii_only: bool) -> str:
    """A line from `begin` to `end` (shares of `cells`), to half a cell, and never shorter than that."""
    first = min(int(begin * 2 * cells), 2 * cells - 1)
    last = min(max(first + 1, round(end * 2 * cells)), 2 * cells)
    line = ""
    for cell in range(cells):
        left, right = first <= 2 * cell < last, first <= 2 * cell + 1 < last
        line += ("-" if left or right else " ") if ascii_only else " ╸╺━"[left + 2 * right]
    return line


def _events(events: Iterable[Event]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("AT", "AFTER"):
        table.add_column(title, justify="right")
    for title in ("PROCESS", "STAGE", ""):
        table.add_column(title)
    before = 0.0
    for event in events:
        at = float(event["at_ms"])
        detail = [printable(event["cause"])] if event.get("cause") else []
        if event.get("tokens") is not None:
            detail.append(_plural(event["tokens"], "token"))
        style = "yellow" if event["stage"] in FAULTS else ""
        process = Text(event["process"], style=STYLES.get(event["process"], ""))
        stage = Text(printable(event["stage"]).replace("_", " "), style=style)
        table.add_row(show_ms(at), "+" + show_ms(at - before), process, stage, Text(", ".join(detail), style=style))
        before = at
    return table


def show_ms(ms: float) -> str:
    """`0.4 ms`, `83 ms`, `2.35 s`, `12 min`."""
    if ms < 10:
        return f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.2f} s" if ms < 600_000 else f"{ms / 60_000:.0f} min"
