"""A barrier per request: a fault in one request's handling, wherever it strikes, ends that request with 500 and touches nobody else."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from sterna.protocol.control import FlushCacheReq
from sterna.protocol.finish import FAULT
from sterna.scheduler import output as output_module
from sterna.scheduler.req import Req, ReqState
from sterna.scheduler.results import StepResult
from sterna.scheduler.scheduler import MAX_FAILED_TURNS
from unit.scheduler.harness import Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")

SHARED = [k % 97 + 1 for k in range(40)]
PROMPTS = {
    "first": [*SHARED, 301],
    "second": [5, 6, 7],
    "bad": [*SHARED, 302, 303],
    "third": [*SHARED, 302, 304],
    "fourth": [8, 9] * 20,
}
LENGTH = 30


def is_bad(value: object) -> bool:
    """Whether a call with this argument is about the request under test."""
    match value:
        case Req():
            return value.rid == "bad"
        case list() | set():
            return any(map(is_bad, value))
        case _:
            return False


def places(h: Harness) -> dict[str, tuple[Any, str]]:
    """Everything that is called for one request while it lives: (owner, attribute)."""
    prefill, ledger, running = h.scheduler.prefill, h.scheduler.ledger, h.scheduler.running
    return {
        "match": (ledger, "match"),
        "open": (ledger, "open"),
        "grow": (ledger, "grow"),
        "grow_by_page": (ledger, "grow_by_page"),
        "cache_computed": (ledger, "cache_computed"),
        "follow": (prefill._followers, "follow"),
        "lead": (prefill._followers, "lead"),
        "dismiss": (prefill._followers, "dismiss"),
        "start": (prefill, "_start"),
        "leave": (prefill, "leave"),
        "add": (running, "add"),
        "discard": (prefill.waiting, "discard"),
        "take_token": (h.scheduler._runner._results, "_take_token"),
        "rebind": (h.scheduler._runner, "_rebind"),
        "row": (output_module, "_row"),
        "opening": (output_module, "_opening"),
    }


def strike(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool, once: bool) -> list[str]:
    """`owner.name` raises for "bad": before or after it has done its work, once or always. Returns a list that grows with each fault."""
    inner: Callable[..., Any] = getattr(owner, name)
    faults: list[str] = []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        mine = any(map(is_bad, args)) and not (once and faults)
        if mine and not after:
            faults.append(name)
            raise RuntimeError(f"injected before {name}")
        result = inner(*args, **kwargs)
        if mine:
            faults.append(name)
            raise RuntimeError(f"injected after {name}")
        return result

    monkeypatch.setattr(owner, name, faulty)
    return faults


def run_crowd(h: Harness) -> None:
    for rid, prompt in PROMPTS.items():
        h.send(rid, prompt, LENGTH, stop_token_ids=(999,))
    h.run()


def assert_only_bad_ended(h: Harness) -> None:
    assert h.abort_code("bad") == (FAULT.status_code, FAULT.code)
    for rid, prompt in PROMPTS.items():
        output = h.output(rid)
        assert output == echo(prompt, len(output) if rid == "bad" else LENGTH), rid
    h.assert_at_baseline()


BEFORE_ONLY = {"rebind", "row", "opening"}
"""These change nothing: before and after are one case."""
ONCE_ONLY = {"discard", "leave"}
"""Taking a request out of where it is: whoever can never be taken out can't end."""


def cases() -> list[tuple[str, bool, bool]]:
    """(place, after, once). Of `grow_by_page`, which may succeed for one alone after all, only what ends a request."""
    every = itertools.product(sorted(places(Harness())), (False, True), (True, False))
    return [
        (place, after, once)
        for place, after, once in every
        if not (after and place in BEFORE_ONLY)
        and not (not once and place in ONCE_ONLY)
        and not (place == "grow_by_page" and (once or after))
    ]


@pytest.mark.parametrize(("place", "after", "once"), cases())
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no radix"])
def test_a_fault_in_one_requests_handling_ends_that_request_and_nothing_else(
    place: str, after: bool, once: bool, radix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = Harness(chunked_prefill_size=16, page_size=8, radix_cache=radix, options="raise_token=77" if place == "rebind" else "")
    if place == "rebind":
        h.send("culprit", [*[5, 6] * 10, 77], LENGTH)
    faults = strike(monkeypatch, *places(h)[place], after=after, once=once)
    run_crowd(h)
    assert faults, "the fault never struck"
    assert_only_bad_ended(h)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_running_rows_that_could_not_grow_together_grow_one_by_one(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(page_size=8)
    faults = strike(monkeypatch, h.scheduler.ledger, "grow_by_page", after=after, once=True)
    run_crowd(h)
    assert faults
    assert all(h.output(rid) == echo(prompt, LENGTH) for rid, prompt in PROMPTS.items())
    h.assert_at_baseline()


@pytest.mark.parametrize("once", [True, False], ids=["once", "always"])
@pytest.mark.parametrize("part", ["release", "cache_computed", "close"])
def test_a_fault_while_one_thing_is_given_back_leaves_nothing_else_behind(part: str, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends with its own reason; what can go back does, and whoever gets its row next is served."""
    h = Harness(max_running_requests=1)
    h.scheduler._check_every_slot = part != "close"  # where closing fails its pages are lost, and the books say so
    owner = h.executor if part == "release" else h.scheduler.ledger
    inner = getattr(owner, part)
    ended: list[str] = []

    def faulty(argument: Any, **kwargs: Any) -> None:
        ending = "bad" in h.scheduler.reqs and len(h.scheduler.reqs["bad"].output_ids) == LENGTH
        if ending and not (once and ended):
            ended.append(part)
            raise RuntimeError(f"injected into {part}")
        inner(argument, **kwargs)

    monkeypatch.setattr(owner, part, faulty)
    for rid in ("bad", "third"):
        h.send(rid, PROMPTS[rid], LENGTH)
    if part == "close":  # its row is lost with its pages: nobody else is to need one
        h.inbox.messages.pop()
    h.run()
    assert ended
    assert h.output("bad") == echo(PROMPTS["bad"], LENGTH)
    if part != "close":
        assert h.output("third") == echo(PROMPTS["third"], LENGTH)
        h.assert_at_baseline()


def test_a_queue_that_cannot_be_sorted_is_served_in_the_order_of_arrival(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(schedule_policy="lpm", max_running_requests=1)
    h.send("warm-up", SHARED, 1)
    h.run()
    monkeypatch.setattr(h.scheduler.ledger.cache, "match_length", lambda *args: 1 / 0)
    h.send("busy", [1, 2, 3], 5)
    h.turn()
    h.send("cold", [4] * 40, 1)
    h.send("warm", SHARED, 1)
    with caplog.at_level(logging.ERROR):
        h.run()
    assert [rid for rid in h.outbox.rows if rid in ("cold", "warm")] == ["cold", "warm"]
    assert "first come first served" in caplog.text
    h.assert_at_baseline()


def test_a_message_that_cannot_be_handled_costs_nobody_his_turn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()
    monkeypatch.setattr(h.scheduler.ledger.cache, "flush", lambda: 1 / 0)
    h.inbox.messages.append(FlushCacheReq(control_id=1, reply_to="ipc://server"))
    with caplog.at_level(logging.ERROR):
        run_crowd(h)
    assert "FlushCacheReq" in caplog.text
    assert all(h.output(rid) == echo(prompt, LENGTH) for rid, prompt in PROMPTS.items())


def test_a_fault_that_no_barrier_foresaw_ends_those_in_the_step_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(max_running_requests=2)
    for rid in ("first", "second", "third"):
        h.send(rid, PROMPTS[rid], LENGTH)
    h.run_until("second", ReqState.RUNNING)
    apply = h.scheduler._apply
    faults = iter([ZeroDivisionError("unforeseen")])

    def apply_or_fail(result: StepResult) -> None:
        for fault in faults:
            raise fault
        apply(result)

    monkeypatch.setattr(h.scheduler, "_apply", apply_or_fail)
    with caplog.at_level(logging.ERROR):
        h.run()
    assert "a turn of the scheduler failed" in caplog.text
    assert h.abort_code("first") == h.abort_code("second") == (500, "engine_failure")
    assert h.output("third") == echo(PROMPTS["third"], LENGTH)
    h.assert_at_baseline()


def test_a_fault_in_every_turn_ends_the_process_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    turns: list[int] = []
    monkeypatch.setattr(h.scheduler, "receive", lambda **kwargs: (turns.append(1), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        h.scheduler.main_loop()
    assert len(turns) == MAX_FAILED_TURNS
