"""Steps that overlap: each is submitted before the one before it has been read, and whatever ends or fails meanwhile stays exact.

The executor of these runs its steps in a thread, and notices when anything that an unread step has to do with changes.
"""

from typing import Any

import pytest

from sterna.protocol.channels import ToScheduler
from sterna.protocol.control import OutputCredit, ShutdownReq
from sterna.protocol.finish import FinishLength, FinishMatchedToken
from sterna.scheduler.decode import Decodes
from sterna.scheduler.req import ReqState
from sterna.scheduler.scheduler import MAX_BATCHES_IN_FLIGHT
from unit.scheduler.gates import LONG, MOMENTS, Log, Moment, close, overlapped
from unit.scheduler.harness import EOS, Harness, Inbox, echo

# ---- the order of things ----


@MOMENTS
def test_every_step_is_submitted_before_the_one_before_it_is_read(moment: Moment) -> None:
    h, _, log = overlapped(moment=moment)
    for rid, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        h.send(rid, prompt, 6)
    h.run()
    # Steps 0..5: the prompts, then five tokens each. Never more than one ahead.
    order = [event for event in log.events if event[0] in ("submit", "read")]
    assert order == [("submit", 0), *(event for step in range(5) for event in (("submit", step + 1), ("read", step))), ("read", 5)]
    # All inputs but the prompts are tokens that nobody has read.
    assert [None if batch.input_from is None else batch.input_from.tolist() for batch in log.batches] == [None, *[[0, 1]] * 5]
    assert (h.output("a"), h.output("b")) == (echo([1, 2, 3], 6), echo([4, 5], 6))
    close(h)


def test_an_executor_that_gains_nothing_by_it_is_read_before_it_is_given_the_next_step() -> None:
    h = Harness(options="threaded=1")
    log = Log(h)
    h.send("a", [1, 2], 5)
    h.run()
    assert len(log.batches) == 5
    assert log.on_top() == []
    assert all(batch.input_from is None for batch in log.batches)
    close(h)


def test_a_prompts_last_chunk_and_the_token_after_its_first_are_two_steps_in_flight() -> None:
    h, _, log = overlapped(chunked_prefill_size=50)
    h.send("a", LONG, 3)
    h.run()
    assert [batch.seq_lens.tolist() for batch in log.batches] == [[50], [100], [120], [121], [122]]
    assert log.on_top() == [1, 2, 3, 4]
    assert h.output("a") == LONG[:3]
    close(h)


# ---- surplus ----


@MOMENTS
def test_an_ending_by_length_is_known_in_advance_and_costs_no_token_too_many(moment: Moment) -> None:
    h, gates, log = overlapped(moment=moment)
    lengths = {f"r{n}": n for n in (1, 2, 7, 12)}
    for rid, count in lengths.items():
        h.send(rid, [9, 8, 7], count)
    h.run()
    assert log.on_top() != []
    assert [h.reason(rid) for rid in lengths] == [FinishLength(count) for count in lengths.values()]
    assert gates.num_sampled == sum(lengths.values())
    close(h)


@pytest.mark.parametrize("reuse", [0, 1])
def test_a_token_after_the_end_appears_nowhere(reuse: int) -> None:
    """In no output, no count and no cache: all is as where no step overlaps."""
    prompt = [*range(1, 60), EOS]

    def ask(h: Harness) -> tuple[object, ...]:
        h.send("a", prompt, 100)
        h.run()
        cached = h.scheduler.ledger.cache.evictable_size
        h.send("next", prompt + h.output("a") + [EOS, 77], 1)
        h.run()
        stats = h.outbox.stats
        assert stats is not None
        return h.output("a"), h.reason("a"), cached, h.cached("next"), stats.output_tokens_total

    options = f"reuse_generated_kv={reuse}"
    h, gates, _ = overlapped(options, page_size=1)
    ended = ask(h)
    assert ended == ask(Harness(options=options, page_size=1))
    assert ended[:2] == (prompt, FinishMatchedToken(EOS, True))
    assert gates.num_sampled == 60 + 1 + 1  # one of them surplus
    close(h)


def test_a_token_taken_from_a_row_that_had_none_harms_no_neighbour() -> None:
    h, _, _ = overlapped("nan_token=66")
    h.send("bad", [1, 2, 66], 9)
    h.send("good", [3, 4, 5], 9)
    h.run()
    assert h.abort_code("bad") == (500, "invalid_logits")
    assert (h.output("bad"), h.output("good")) == ([1, 2], echo([3, 4, 5], 9))
    assert h.scheduler._runner.count == 9, "no step was run again"
    close(h)


# ---- endings in flight ----


def test_what_a_step_in_flight_uses_is_given_back_when_it_has_been_read() -> None:
    h, _, log = overlapped()
    h.send("a", [1, 2, EOS, 3], 50)
    h.run_until("a", ReqState.RUNNING)
    req = h.scheduler.reqs["a"]
    while h.scheduler.reqs:
        h.turn()
    # Ended for the world outside; its next step is in flight.
    assert h.reason("a") == FinishMatchedToken(EOS, True)
    assert not h.scheduler.is_idle
    assert (h.executor.num_bound, h.scheduler.ledger.used > 0, req.req_pool_idx >= 0) == (1, True, True)
    assert ("release", req.req_pool_idx) not in log.events[1:]
    last = h.scheduler._runner.count - 1
    h.turn()
    assert log.events[-2:] == [("read", last), ("release", 0)]
    close(h)


def test_an_abort_is_answered_in_its_turn_though_a_step_is_in_flight() -> None:
    h, gates, log = overlapped()
    for rid in ("a", "b"):
        h.send(rid, [1, 2, 3], 30)
    h.run_until("b", ReqState.RUNNING)
    sent = len(h.output("a"))
    h.abort("a")
    h.turn()
    assert h.reason("a").code == "aborted"  # type: ignore[union-attr]
    assert len(h.output("a")) == sent
    assert log.batches[-1].num_rows == 1
    h.run()
    assert h.output("b") == echo([1, 2, 3], 30)
    assert gates.num_sampled > len(h.output("a")) + 30
    close(h)


def test_a_rid_may_come_again_while_the_last_step_of_its_first_life_is_in_flight() -> None:
    h, _, log = overlapped(max_running_requests=1)
    h.send("a", [1, 2, EOS], 50)
    while "a" not in h.outbox.rows or h.outbox.rows["a"][-1].finished_reason is None:
        h.turn()
    assert h.scheduler._in_flight.departing
    first = h.outbox.rows.pop("a")
    h.send("a", [7, 8, 9], 5)
    h.run()
    assert [token for row in first for token in row.output_ids] == [1, 2, EOS]
    assert h.output("a") == echo([7, 8, 9], 5)
    binds = [at for at, event in enumerate(log.events) if event[0] == "bind"]
    assert len(binds) == 2
    assert ("read", 3) in log.events[: binds[1]], "the only row was lent again before the surplus step had been read"
    close(h)


def test_memory_that_an_ended_one_still_holds_is_waited_for_and_nobody_is_refused_for_it() -> None:
    """The pool holds one of them at a time."""
    h, _, _ = overlapped(max_total_tokens=64, radix_cache=False)
    for i in range(4):
        h.send(f"r{i}", [i + 1] * 40 + [EOS], 23)
        h.send(f"ends{i}", [EOS] * 60, 4)
    h.run()
    for i in range(4):
        assert h.output(f"r{i}") == [i + 1] * 23
        assert h.output(f"ends{i}") == [EOS]
    close(h)


@MOMENTS
def test_nobody_is_retracted_before_the_step_in_flight_has_been_read(moment: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    h, _, log = overlapped(moment=moment, max_total_tokens=256, chunked_prefill_size=24)
    short: list[int] = []
    grow, retract = h.scheduler._grow_running, h.scheduler._retract_one

    def watched_grow() -> Decodes | None:
        decodes = grow()
        if decodes is None and h.scheduler._in_flight:
            short.append(1)
        return decodes

    def watched_retract() -> None:
        assert not h.scheduler._in_flight
        retract()

    monkeypatch.setattr(h.scheduler, "_grow_running", watched_grow)
    monkeypatch.setattr(h.scheduler, "_retract_one", watched_retract)
    h.scheduler.prefill.ratio.value = 0.0
    prompts = {f"r{i}": [i + 1, *LONG[i : 12 + i]] for i in range(8)}
    for rid, prompt in prompts.items():
        h.send(rid, prompt, 90)
    h.run()
    assert h.outbox.stats is not None
    assert h.outbox.stats.retractions_total > 0
    assert len(short) > 0
    assert len(log.on_top()) > 50
    assert all(h.output(rid) == echo(prompt, 90) for rid, prompt in prompts.items())
    close(h)


# ---- the cache ----


def test_a_prefix_computed_twice_is_handed_over_only_when_no_step_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has in the cache the other gives up for it, and that changes his slots: not before his last step."""
    h, _, _ = overlapped(chunked_prefill_size=40, page_size=8)
    monkeypatch.setattr(h.scheduler.prefill._followers, "follow", lambda *args: False)
    for rid in ("a", "b"):
        h.send(rid, LONG, 20)
    h.run_until("b", ReqState.RUNNING)
    a, b = (h.scheduler.reqs[rid] for rid in ("a", "b"))
    assert (a.tree_len, b.tree_len, b.kv_len) == (120, 80, 120)  # it found 80 in the cache, and computed what "a" did at the same time
    h.run()
    assert h.scheduler.ledger.cache.evictable_size == 144  # 120 and 19 of output, once
    h.send("next", [*LONG, 5], 1)
    h.run()
    assert h.cached("next") == 120
    close(h)


def test_a_next_turn_that_comes_before_the_surplus_step_is_over_finds_whole_pages_of_the_answer() -> None:
    h, _, _ = overlapped(page_size=8)
    prompt = [*range(1, 30), EOS]
    h.send("a", prompt, 100)
    while h.scheduler.reqs or not h.outbox.rows.get("a"):
        h.turn()
    assert h.output("a") == prompt
    assert h.scheduler._in_flight.departing
    h.send("next", [*prompt, *h.output("a"), 77], 1)
    h.run()
    assert h.cached("next") == 56  # of 59 computed
    close(h)


def test_a_follower_waits_until_what_it_waits_for_has_been_read() -> None:
    h, _, log = overlapped()
    h.send("leader", LONG, 8)
    h.send("follower", [*LONG, 7], 2)
    h.run()
    assert h.cached("follower") == 112
    assert [batch.seq_lens.tolist() for batch in log.batches][:3] == [[120], [121], [122, 121]]
    close(h)


# ---- waiting ----


class ScriptedInbox(Inbox):
    """Notes what is in flight whenever it is waited for, and then has one more message."""

    def __init__(self, h: Harness, script: list[ToScheduler]) -> None:
        super().__init__()
        self.waits: list[int] = []
        self._h, self._script = h, script

    def wait(self, timeout_ms: int | None = None) -> bool:
        self.waits.append(len(self._h.scheduler._in_flight))
        self.messages.append(self._script.pop(0))
        return True


def scripted_inbox(h: Harness, script: list[ToScheduler]) -> ScriptedInbox:
    inbox = ScriptedInbox(h, script)
    h.scheduler._inbox = inbox
    return inbox


def test_a_step_in_flight_is_read_before_the_scheduler_sleeps() -> None:
    h, _, log = overlapped()
    h.send("a", [1, 2, EOS], 50)
    (request,) = h.inbox.messages
    inbox = scripted_inbox(h, [request, ShutdownReq()])
    h.scheduler.main_loop()
    assert h.output("a") == [1, 2, EOS]
    assert log.on_top() == [1, 2, 3]
    assert inbox.waits == [0, 0]
    h.assert_at_baseline()


def test_without_credit_the_step_in_flight_is_read_and_no_other_is_submitted() -> None:
    h, _, log = overlapped()
    h.send("a", [1, 2, 3], 100)
    (request,) = h.inbox.messages
    inbox = scripted_inbox(h, [request, OutputCredit(batches=2), ShutdownReq()])
    h.scheduler.main_loop()
    assert inbox.waits == [0, 0, 0]
    # One step more than batches may leave, and after two more credits two steps more; nothing of it was lost.
    assert h.outbox.batches == MAX_BATCHES_IN_FLIGHT + 2 + 1  # the last one is forced by the shutdown
    assert h.output("a") == echo([1, 2, 3], len(log.batches))
    h.assert_at_baseline()


def test_a_shutdown_gives_up_the_step_in_flight_and_holds_nothing() -> None:
    h, _, log = overlapped(page_size=1, moment="early")
    h.send("a", [1, 2, 3], 100)
    for _ in range(6):
        h.turn()
    assert h.scheduler._in_flight
    h.inbox.messages.append(ShutdownReq())
    h.scheduler.main_loop()
    reads = [step for what, step in log.events if what == "read"]
    assert reads == list(range(len(log.batches)))
    assert h.abort_code("a") == (503, "draining")
    assert len(h.output("a")) == len(log.batches) - 1, "what the last step made counts for nobody"
    h.assert_at_baseline()


def test_a_fault_of_the_loop_while_a_step_is_in_flight_ends_those_in_it_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    h, _, _ = overlapped(max_running_requests=2)
    for rid in ("a", "b", "c"):
        h.send(rid, [1, 2, 3], 12)
    h.run_until("b", ReqState.RUNNING)
    choose, faults = h.scheduler.choose, iter([ZeroDivisionError("unforeseen")])

    def fails_once() -> Any:
        for fault in faults:
            raise fault
        return choose()

    monkeypatch.setattr(h.scheduler, "choose", fails_once)
    h.run()
    assert h.abort_code("a") == h.abort_code("b") == (500, "engine_failure")
    assert h.output("c") == echo([1, 2, 3], 12)
    close(h)
