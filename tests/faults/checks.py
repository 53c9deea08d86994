"""What must be true afterwards. Each check raises AssertionError with all that is wrong, not only the first."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from faults.load import Answer
from running_server import PROMPTLY_S, RunningServer, until

IDLE_GAUGES = ("sterna_requests_running", "sterna_scheduler_running", "sterna_scheduler_waiting", "sterna_kv_used_tokens")
EXCUSED = ("engine_dead", "aborted", "draining")
"""Codes of endings that a client may get where the group ends."""
MAY_GROW = re.compile(
    r"sterna\.(mem_cache\.(radix|eviction)\w*|server\.metrics|protocol)\b"
    r"|record|child\.Death|req_state\.(Origin|RequestTimes)|Throughput|session\.Session$|Sessions\._deadlines|^\w+: blocks",
    re.IGNORECASE,
)
"""What outlives a request, within a bound: cached prefixes, counters, the last message, the flight recorder, closed
sessions' places in a heap."""


def each_is_answered_once(answers: Sequence[Answer]) -> None:
    """One terminal answer each: a finish reason, or an error; by the protocol, and nothing after it."""
    wrong = []
    for answer in answers:
        endings = (answer.finish is not None and answer.error is None) + (answer.error is not None)
        lost = answer.finish is not None and answer.ask.wants_logprobs and len(answer.logprobs) != answer.usage.get("completion_tokens")
        if endings != 1 or answer.faults or answer.broken or answer.status is None or lost:
            wrong.append(
                f"{answer.ask.name}: {answer.status} finish={answer.finish} error={answer.error} {answer.broken} {answer.faults}"
                f" {len(answer.logprobs)} logprobs, {answer.usage}"
            )
    assert not wrong, "\n".join(wrong)


def each_has_its_undisturbed_answer(answers: Sequence[Answer], reference: Sequence[Answer]) -> None:
    """Text, ids, logprobs, usage and reason."""
    wrong = []
    for answer, undisturbed in zip(answers, reference, strict=True):
        if answer.status != 200 or answer.error is not None or answer.content != undisturbed.content:
            wrong.append(f"{answer.ask.name}: {answer.status} {answer.error}\n  {answer.content}\n  {undisturbed.content}")
    assert not wrong, "\n".join(wrong)


def each_has_its_undisturbed_answer_or_an_honest_error(answers: Sequence[Answer], reference: Sequence[Answer]) -> int:
    """What was cut off is a prefix, and says why. Returns how many were."""
    wrong, cut = [], 0
    for answer, undisturbed in zip(answers, reference, strict=True):
        if answer.error is None:
            if answer.content != undisturbed.content:
                wrong.append(f"{answer.ask.name}: {answer.content}\n  {undisturbed.content}")
            continue
        cut += 1
        is_prefix = undisturbed.text.startswith(answer.text) and undisturbed.logprobs[: len(answer.logprobs)] == answer.logprobs
        if answer.error.get("code") not in EXCUSED or not is_prefix:
            wrong.append(f"{answer.ask.name}: {answer.error} {answer.text!r}\n  {undisturbed.text!r}")
    assert not wrong, "\n".join(wrong)
    return cut


def is_idle(server: RunningServer) -> bool:
    """KV and queues at their baseline, and every request that began has ended."""
    samples = server.metrics()
    ended = sum(value for name, value in samples.items() if name.startswith("sterna_requests_total{"))
    return all(samples.get(name) == 0 for name in IDLE_GAUGES) and ended == samples["sterna_requests_started_total"]


def gauges_are_at_their_baseline(server: RunningServer) -> None:
    try:
        until(lambda: is_idle(server), PROMPTLY_S)
    except AssertionError:
        samples = {name: value for name, value in server.metrics().items() if name in IDLE_GAUGES or "requests" in name}
        raise AssertionError(f"held on to something: {samples}\n{server.read_log()[-3000:]}") from None


def processes_of(folder: Path) -> dict[int, str]:
    """Live processes that were started for `folder` ($FAULTS_DIR), whoever their parent is now: pid → command."""
    mark = f"FAULTS_DIR={folder}".encode()
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0") and " Z " not in (environ.parent / "stat").read_text():
                found[int(environ.parent.name)] = (environ.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def nobody_lives(folder: Path, timeout_s: float) -> None:
    try:
        until(lambda: not processes_of(folder), timeout_s)
    except AssertionError:
        orphans = processes_of(folder)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"orphans after {timeout_s:g} s: {orphans}") from None


def exactly_the_group_lives(server: RunningServer, folder: Path) -> None:
    """One of each, once whoever died has been replaced."""

    def complete() -> bool:
        expected = {server.process.pid, *server.children().values()}
        return len(expected) == 3 and processes_of(folder).keys() == expected and server.get("/ready").status_code == 200

    try:
        until(complete, PROMPTLY_S)
    except AssertionError:
        raise AssertionError(f"{processes_of(folder)}\n{server.read_log()[-3000:]}") from None


Census = dict[str, dict[str, int]]
"""Process → class → how many instances live."""


def take_census(server: RunningServer, folder: Path) -> Census:
    census = {}
    for name, pid in {"server": server.process.pid, **server.children()}.items():
        written = folder / f"census-{pid}"
        os.kill(pid, signal.SIGUSR2)
        until(written.exists, PROMPTLY_S)
        census[name] = json.loads(written.read_text())
        written.unlink()
    return census


def growth(before: Census, after: Census) -> dict[str, int]:
    return {
        f"{process}: {cls}": count - before[process].get(cls, 0)
        for process, classes in after.items()
        for cls, count in classes.items()
        if count > before[process].get(cls, 0) and not MAY_GROW.search(f"{process}: {cls}")
    }


def nothing_is_held(server: RunningServer, folder: Path, before: Census) -> None:
    """No process holds more objects of Sterna's than it did after an undisturbed run."""
    grown: dict[str, int] = {}

    def settled() -> bool:
        nonlocal grown
        grown = growth(before, take_census(server, folder))
        return not grown

    try:
        until(settled, PROMPTLY_S)
    except AssertionError:
        raise AssertionError(f"left behind: {grown}") from None
