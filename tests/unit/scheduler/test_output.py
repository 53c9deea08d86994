"""How often rows leave, and what the gauge says; and that a turn's work doesn't depend on who waits."""

import sys
from types import FrameType

import pytest

from sterna.protocol.generate import DecodeOpening
from unit.scheduler.harness import Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")


def row_lengths(h: Harness, rid: str) -> list[int]:
    return [len(row.output_ids) for row in h.outbox.rows[rid]]


def test_a_stream_gets_its_first_token_at_once_and_then_one_row_per_interval() -> None:
    h = Harness(stream_interval=4)
    h.send("a", [1, 2, 3], 12)
    h.run()
    assert row_lengths(h, "a") == [1, 4, 4, 3]


def test_a_request_that_nobody_watches_is_sent_in_large_pieces() -> None:
    h = Harness()
    h.send("a", [1, 2, 3], 150, stream=False)
    h.run()
    assert row_lengths(h, "a") == [1, 64, 64, 21]
    assert h.output("a") == echo([1, 2, 3], 150)


def test_the_opening_says_how_to_decode() -> None:
    h = Harness()
    prompt = [k % 900 for k in range(100)]
    h.send("a", prompt, 2, stop=("q",), skip_special_tokens=False, no_stop_trim=True)
    h.run()
    assert h.outbox.rows["a"][0].opening == DecodeOpening(
        prompt_tail=prompt[-64:],
        skip_special_tokens=False,
        spaces_between_special_tokens=True,
        no_stop_trim=True,
        stop=("q",),
        reply_to="ipc://server",
        prompt_tokens=100,
        cached_tokens=0,
    )


def test_the_terminal_row_says_when_what_happened() -> None:
    h = Harness(chunked_prefill_size=16)
    h.send("a", list(range(1, 41)), 5)
    h.run()
    times = h.outbox.rows["a"][-1].times
    assert times is not None
    assert times.first_scheduled is not None
    assert times.first_token is not None
    assert times.last_token is not None
    assert times.received <= times.first_scheduled <= times.first_token <= times.last_token
    assert times.chunks == 3


def test_the_gauge_reconciles_with_what_was_done() -> None:
    h = Harness()
    for i in range(20):
        h.send(f"r{i}", [1 + i] * 40, 7)
    h.run()
    for i in range(20):
        h.send(f"again{i}", [1 + i] * 40, 7)
    h.run()
    stats = h.outbox.stats
    assert stats is not None
    assert stats.prompt_tokens_total == 40 * 40
    assert stats.cached_tokens_total == 20 * 39
    assert stats.output_tokens_total == 40 * 7
    assert stats.max_batch_size == 20


def calls_per_turn(running: int, waiting: int, policy: str) -> int:
    """Function calls, Python's and C's, in one turn with `running` decodes and `waiting` requests behind them. No clock involved."""
    h = Harness(
        max_running_requests=running,
        max_queued_requests=1_000_000,
        schedule_policy=policy,
        chunked_prefill_size=0,
        page_size=64,
        options="verify=0",
        max_total_tokens=200_000,
    )
    h.scheduler._check_every_slot = False
    h.scheduler.stats.due = lambda now: False  # type: ignore[method-assign]
    for i in range(running + waiting):
        h.send(f"r{i}", [1 + i % 900, 2 + i // 900, 3], 60, return_logprob=False)
    while len(h.scheduler.running) < running or len(h.scheduler.reqs) < running + waiting:
        h.turn()
    h.turn()
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        # Ours only: a garbage collection that falls into the turn runs other people's callbacks.
        file = frame.f_code.co_filename
        calls += event in ("call", "c_call") and "/sterna/" in file and "/executor/" not in file

    sys.setprofile(count)
    try:
        h.scheduler.receive()
        h.scheduler.step()
    finally:
        sys.setprofile(None)
    assert len(h.scheduler.running) == running
    return calls


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_turns_work_does_not_depend_on_how_many_wait(policy: str) -> None:
    assert calls_per_turn(8, 10_000, policy) <= calls_per_turn(8, 10, policy)


def test_a_turns_work_grows_no_faster_than_the_running_requests() -> None:
    few, many = calls_per_turn(16, 0, "fcfs"), calls_per_turn(256, 0, "fcfs")
    assert many - few <= 8 * (256 - 16)
