"""Each process is stopped, delayed or killed at each point that a request passes, under 32 mixed streams: no client can tell.

`make test` runs a slice, `make faults` everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from faults.conftest import TIGHT, Bench
from faults.faults import MOMENTS, POINTS, Act, Fault

pytestmark = pytest.mark.timeout(600)

ONCE_A_REQUEST = ("tokenize", "intake", "bind")
"""Points that are passed as a request begins."""
NOW_AND_THEN = ("stats",)
"""Passed once a second: near the end it may not come any more."""
NEEDS_TIGHT = ("retract",)

SLICE = [
    Fault("scheduler", "kill", "all speak", "send.after"),
    Fault("detokenizer", "kill", "in full flow", "receive.before"),
    Fault("scheduler", "stop", "some have ended"),
    Fault("server", "delay", "first output", "fold.before"),
]


def acts_on(process: str) -> list[Act]:
    return ["stop", "delay"] if process == "server" else ["kill", "stop", "delay"]


def every_fault() -> Iterator[Fault]:
    """Every act at every point, its moment by turns; and every act from outside at every moment."""
    early, late = itertools.cycle(["at the start", "half are there"]), itertools.cycle(list(MOMENTS)[2:])
    middle = itertools.cycle(["first output", "all speak"])
    for name in POINTS:
        process, _, point = name.partition(".")
        if point in NEEDS_TIGHT:
            continue
        begins = point in ONCE_A_REQUEST or (process, point) == ("server", "send")
        for side, act in itertools.product(("before", "after"), acts_on(process)):
            moments = early if begins else middle if point in NOW_AND_THEN else late
            yield Fault(process, act, next(moments), f"{point}.{side}")  # type: ignore[arg-type]
    for process in ("server", "scheduler", "detokenizer"):
        for act, moment in itertools.product(acts_on(process), MOMENTS):
            yield Fault(process, act, moment)  # type: ignore[arg-type]


def cases() -> list[object]:
    return [*SLICE, *(pytest.param(fault, marks=pytest.mark.exhaustive) for fault in every_fault() if fault not in SLICE)]


@pytest.mark.parametrize("fault", cases(), ids=str)
def test_no_client_can_tell_that_something_happened(bench: Callable[..., Bench], fault: Fault) -> None:
    here = bench()
    here.strike(fault)
    here.is_as_before()


PAIRS = [
    # Both at once.
    (Fault("scheduler", "kill", "in full flow"), Fault("detokenizer", "kill", "in full flow")),
    # One after the other has been restarted.
    (Fault("scheduler", "kill", "first output"), Fault("detokenizer", "kill", "some have ended")),
    (Fault("detokenizer", "kill", "first output"), Fault("scheduler", "kill", "some have ended")),
    # The one that came in its place dies while it takes in what is replayed; all were taken in by the first before.
    (Fault("scheduler", "kill", "all speak", "output.after"), Fault("scheduler", "kill", "all speak", "intake.after")),
    # What the scheduler sent lies unread in front of a detokenizer that stands still, and the scheduler dies.
    (Fault("detokenizer", "stop", "all speak", "receive.before"), Fault("scheduler", "kill", "all speak", "send.after")),
    # What the detokenizer sent lies unread in front of the server.
    (Fault("server", "stop", "all speak", "fold.before"), Fault("detokenizer", "kill", "all speak", "send.after")),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "; ".join(map(str, pair)))
def test_nor_when_two_things_happen(bench: Callable[..., Bench], pair: tuple[Fault, Fault]) -> None:
    here = bench()
    here.strike(*pair)
    here.is_as_before()


UNDER_PRESSURE = [
    Fault("scheduler", "kill", "first output", "retract.before"),
    Fault("scheduler", "kill", "first output", "retract.after"),
    Fault("scheduler", "stop", "first output", "retract.before"),
    Fault("scheduler", "kill", "half are there"),
    Fault("scheduler", "kill", "in full flow"),
    Fault("detokenizer", "kill", "in full flow"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", UNDER_PRESSURE, ids=str)
def test_nor_while_requests_queue_and_are_retracted(bench: Callable[..., Bench], fault: Fault) -> None:
    here = bench(*TIGHT)
    before = here.struck.server.metrics()["sterna_retractions_total"]
    here.strike(fault)
    if fault.act != "kill":  # another scheduler begins to count anew
        assert here.struck.server.metrics()["sterna_retractions_total"] > before
    here.is_as_before()
