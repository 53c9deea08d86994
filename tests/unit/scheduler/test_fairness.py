"""Who goes first, and that nobody waits for ever: priorities and prefixes are head starts in seconds. And what order costs."""

import random

import pytest

from sterna.protocol.finish import FinishAbort
from sterna.protocol.generate import AbortReq
from sterna.scheduler.req import Req, ReqState
from sterna.scheduler.waiting import WaitingQueue
from unit.scheduler.harness import Harness, echo
from unit.scheduler.test_waiting import req_of

AGEING_S = 10.0


def busy(**settings: object) -> Harness:
    """A scheduler with one row, which is taken."""
    h = Harness(max_running_requests=1, priority_ageing=AGEING_S, **settings)
    h.send("busy", [1, 2, 3], 5)
    h.run_until("busy", ReqState.RUNNING)
    return h


def served(h: Harness) -> list[str]:
    h.run()
    h.assert_at_baseline()
    return [rid for rid in h.outbox.started if rid != "busy"]


@pytest.mark.usefixtures("either_way")
def test_higher_priorities_go_first_and_equals_in_the_order_of_their_arrival() -> None:
    h = busy(schedule_policy="priority")
    for rid, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 5), ("e", 0)):
        h.send(rid, [4, 5], 2, priority=priority)
    assert served(h) == ["b", "d", "a", "e", "c"]


def test_a_level_of_priority_is_worth_so_many_seconds_of_waiting_and_no_more() -> None:
    h = busy(schedule_policy="priority")
    h.send("old", [4, 5], 2, priority=0, arrival=100.0)
    h.send("too late", [4, 5], 2, priority=3, arrival=100.0 + 3 * AGEING_S + 0.1)
    h.send("in time", [4, 5], 2, priority=3, arrival=100.0 + 3 * AGEING_S - 0.1)
    assert served(h) == ["in time", "old", "too late"]


def test_under_endless_traffic_of_the_highest_priority_the_lowest_is_served() -> None:
    h = busy(schedule_policy="priority")
    h.send("lowest", [4, 5], 1, priority=-100, arrival=1.0)
    arrivals = {f"high{i}": 1.0 + 10.0 * i for i in range(1, 250)}
    for rid, arrival in arrivals.items():
        h.send(rid, [4, 5], 1, priority=100, arrival=arrival)
    order = served(h)
    before = order[: order.index("lowest")]
    assert before == [rid for rid, arrival in arrivals.items() if arrival < 1.0 + 200 * AGEING_S]
    assert 0 < len(before) < len(arrivals)


@pytest.mark.usefixtures("either_way")
def test_the_retracted_stand_in_front_of_every_priority_and_begin_only_once() -> None:
    h = Harness(schedule_policy="priority", max_total_tokens=512, radix_cache=False)
    for i in range(12):
        h.send(f"low{i}", [i, 1, 2], 120)
    while not h.scheduler.stats.retractions:
        h.turn()
    back = h.scheduler.prefill.waiting.head()
    assert back is not None
    assert back.retractions
    h.send("high", [4, 5], 2, priority=100)
    h.turn()
    assert h.scheduler.prefill.waiting.head() is back
    h.run()
    assert sorted(h.outbox.started) == sorted(h.outbox.rows)
    for i in range(12):
        assert h.output(f"low{i}") == echo([i, 1, 2], 120)
    h.assert_at_baseline()


def test_endless_warm_traffic_does_not_starve_a_cold_request_under_lpm() -> None:
    h = Harness(schedule_policy="lpm", max_running_requests=1)
    warm = [7] * 512
    h.send("warm-up", warm, 1)
    h.run()
    h.send("busy", [1, 2, 3], 5)
    h.run_until("busy", ReqState.RUNNING)
    h.send("cold", [8] * 64, 1, arrival=1.0)
    passed = 0
    while "cold" not in h.outbox.started:
        passed += 1
        assert passed < 100, "starved"
        h.send(f"warm{passed}", warm, 1, arrival=1.0 + passed / 4)
        h.turn()
    assert passed > 5, "warm ones go first for a while"
    h.run()


def test_among_those_that_came_together_lpm_goes_by_prefix_alone() -> None:
    h = Harness(schedule_policy="lpm", max_running_requests=1)
    h.send("warm-up", [7] * 256, 1)
    h.run()
    h.send("busy", [1, 2, 3], 5)
    h.run_until("busy", ReqState.RUNNING)
    for length in (32, 128, 0, 224, 64):
        h.send(f"warm{length}", [7] * length + [9] * 32, 1)
    h.run()
    assert h.outbox.started[2:] == ["warm224", "warm128", "warm64", "warm32", "warm0"]


# ---- who has begun, and who ends for what ----


@pytest.mark.usefixtures("either_way")
def test_who_never_left_the_queue_has_not_begun_and_an_abort_says_why() -> None:
    h = Harness(max_running_requests=1, max_queued_requests=1)
    why = FinishAbort("over", 503, "waiting_timeout")
    h.send("runs", [1, 2], 50)
    h.send("waits", [3, 4], 5)
    h.send("refused", [5, 6], 5)
    h.turn()
    h.turn()
    h.inbox.messages.append(AbortReq(rid="waits", reason=why))
    h.turn()
    assert h.reason("waits") == why
    assert h.outbox.started == ["runs"]
    over = FinishAbort("over", 504, "running_timeout")
    made = len(h.scheduler.reqs["runs"].output_ids)
    h.inbox.messages.append(AbortReq(rid="runs", reason=over))
    h.turn()
    assert h.reason("runs") == over
    assert h.output("runs") == echo([1, 2], made), "all that it had made comes before its end"
    h.run()
    h.assert_at_baseline()


# ---- what order costs ----


class Counted(float):
    """A place in the order that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other: object) -> bool:
        Counted.looks += 1
        return float.__lt__(self, other)  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


def test_a_turn_costs_the_same_with_ten_thousand_waiting() -> None:
    rng = random.Random(1)
    costs = {}
    for length in (100, 10_000):
        calls: list[Req] = []

        def order(req: Req, calls: list[Req] = calls) -> Counted:
            calls.append(req)
            return Counted(rng.random())

        queue = WaitingQueue(order)
        for serial in range(length):
            queue.push_back(req_of(serial))
        assert len(calls) == length
        Counted.looks = 0
        for serial in range(length, length + 100):  # as many turns, each with one that goes and one that comes
            head = queue.head()
            assert head is not None
            queue.discard(head)
            queue.push_back(req_of(serial))
            assert queue.head() is not None
        assert len(calls) == length + 100, "nobody is asked for his place again"
        costs[length] = Counted.looks / 100
    assert costs[10_000] < 3 * costs[100] < 300, costs


@pytest.mark.parametrize("seed", range(10))
def test_an_ordered_queue_equals_a_list_that_is_sorted_anew(seed: int) -> None:
    rng = random.Random(seed)
    values: dict[str, float] = {}
    queue = WaitingQueue(lambda req: values.setdefault(req.rid, rng.choice([0.0, 1.0, 2.0])))
    here, away = list[Req](), list[Req]()

    def key(req: Req) -> tuple[bool, float, int]:
        return not req.retractions, 0.0 if req.retractions else values[req.rid], req.serial

    for serial in range(300):
        action = rng.random()
        if action < 0.5:
            here.append(req_of(serial))
            queue.push_back(here[-1])
        elif here and action < 0.8:
            head = min(here, key=key)
            assert queue.head() is head
            queue.discard(head)
            here.remove(head)
            away.append(head)
        elif away:
            back = away.pop(rng.randrange(len(away)))
            back.retractions += rng.random() < 0.5
            queue.push_front([back])
            here.append(back)
        assert list(queue) == sorted(here, key=key)
