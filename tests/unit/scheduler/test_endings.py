"""Every ending, in every state: one terminal row, everything given back, nobody else touched."""

import logging

import pytest

from sterna.executor import scripted
from sterna.executor.base import ForwardBatch, StepHandle
from sterna.executor.scripted import scripted_logprobs
from sterna.protocol.control import OutputCredit, ShutdownReq
from sterna.protocol.finish import FAULT, FinishAbort, FinishLength
from sterna.protocol.generate import BatchTokenizedGenerateReqInput, SchedulerTimes
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.req import ReqState
from sterna.scheduler.scheduler import MAX_BATCHES_IN_FLIGHT
from unit.scheduler.harness import Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")

LONG = [3, 4, 5] * 40


def aborted(h: Harness, rid: str) -> bool:
    return h.reason(rid) == FinishAbort("aborted", 499, "aborted")


def test_a_request_aborted_while_it_waits_never_starts() -> None:
    h = Harness(max_running_requests=1)
    h.send("running", [1, 2], 50)
    h.send("waiting", [3, 4], 50)
    h.run_until("running", ReqState.RUNNING)
    assert h.scheduler.reqs["waiting"].state is ReqState.WAITING
    h.abort("waiting")
    h.run()
    assert aborted(h, "waiting")
    assert h.output("waiting") == []
    times = h.outbox.rows["waiting"][-1].times
    assert isinstance(times, SchedulerTimes)
    assert times.first_scheduled is None
    assert h.output("running") == echo([1, 2], 50)
    h.assert_at_baseline()


def test_a_request_aborted_between_two_chunks_gives_its_kv_back() -> None:
    h = Harness(chunked_prefill_size=16)
    h.send("a", LONG, 50)
    h.run_until("a", ReqState.PREFILL)
    while not h.scheduler.reqs["a"].kv_len:
        h.turn()
    assert h.scheduler.reqs["a"].kv_len < len(LONG)
    h.abort("a")
    h.run()
    assert aborted(h, "a")
    h.assert_at_baseline()


def test_a_running_request_aborted_ends_at_once_and_touches_nobody_else() -> None:
    h = Harness()
    for i in range(4):
        h.send(f"r{i}", [10 + i, 20 + i], 40)
    h.run_until("r2", ReqState.RUNNING)
    before = len(h.output("r2"))
    h.abort("r2")
    h.turn()
    assert aborted(h, "r2")
    assert len(h.output("r2")) == before
    h.run()
    for i in (0, 1, 3):
        assert h.output(f"r{i}") == echo([10 + i, 20 + i], 40)
    h.assert_at_baseline()


def test_a_retracted_request_can_be_aborted() -> None:
    h = Harness(max_total_tokens=160, radix_cache=False)
    for i in range(4):
        h.send(f"r{i}", [10 + i] * 16, 90)
    for _ in range(500):
        h.turn()
        retracted = [rid for rid, req in h.scheduler.reqs.items() if req.retractions and req.state is ReqState.WAITING]
        if retracted:
            break
    h.abort(retracted[0])
    h.run()
    assert aborted(h, retracted[0])
    h.assert_at_baseline()


def with_a_follower() -> Harness:
    """Two admitted in one step, the second one waiting for the first one's prefix."""
    h = Harness()
    h.send("leader", LONG, 4)
    h.send("follower", [*LONG, 9], 4)
    h.scheduler.receive()
    h.scheduler.admit()
    assert h.scheduler.reqs["leader"].state is ReqState.PREFILL
    assert h.scheduler.reqs["follower"].has_waited_for_prefix
    assert (h.scheduler.prefill.num_waiting, len(h.scheduler.prefill.waiting)) == (1, 0)
    return h


def test_a_request_that_waits_for_anothers_prefix_can_be_aborted() -> None:
    h = with_a_follower()
    h.abort("follower")
    h.run()
    assert aborted(h, "follower")
    assert h.output("leader") == echo(LONG, 4)
    h.assert_at_baseline()


def test_the_leader_aborted_lets_its_followers_go_on() -> None:
    h = with_a_follower()
    h.abort("leader")
    h.run()
    assert aborted(h, "leader")
    assert h.output("follower") == echo([*LONG, 9], 4)
    assert h.cached("follower") == 0
    h.assert_at_baseline()


def test_an_abort_after_the_end_or_of_an_unknown_rid_is_ignored() -> None:
    h = Harness()
    h.send("a", [1, 2], 3)
    h.run()
    h.abort("a")
    h.abort("nobody")
    h.turn()
    assert h.reason("a") == FinishLength(3)
    assert "nobody" not in h.outbox.rows


def test_an_abort_ends_exactly_its_rid() -> None:
    h = Harness()
    for rid in ("req-1", "req-10", "req-1 "):
        h.send(rid, [1, 2], 8)
    h.turn()
    h.abort("req-1")
    h.run()
    assert aborted(h, "req-1")
    assert h.reason("req-10") == h.reason("req-1 ") == FinishLength(8)


def test_a_thousand_aborts_leave_nothing_behind() -> None:
    h = Harness(max_running_requests=16, max_total_tokens=4096)
    for i in range(1000):
        h.send(f"r{i}", [i % 50, i % 7, 1] * (1 + i % 20), 100)
        if i >= 20:
            h.abort(f"r{i - 20}")
        if i % 5 == 0:
            h.turn()
    for i in range(980, 1000):
        h.abort(f"r{i}")
    h.run()
    assert all(aborted(h, f"r{i}") for i in range(1000))
    h.assert_at_baseline()


def test_a_second_request_under_a_live_rid_does_not_disturb_the_first(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()
    h.send("a", [1, 2, 3], 6)
    h.turn()
    h.send("a", [7, 8, 9], 6)
    twin = h.inbox.messages.pop()
    h.inbox.messages.append(BatchTokenizedGenerateReqInput(reqs=[twin, twin]))  # type: ignore[list-item]
    with caplog.at_level(logging.ERROR):
        h.run()
    assert h.output("a") == echo([1, 2, 3], 6)
    assert caplog.text.count("second request") == 2
    h.assert_at_baseline()


@pytest.mark.parametrize(
    ("prompt", "settings", "status", "code"),
    [
        pytest.param([], {}, 400, "invalid_value", id="no token"),
        pytest.param([1, 1000], {}, 400, "invalid_value", id="beyond the vocabulary"),
        pytest.param([-1], {}, 400, "invalid_value", id="negative"),
        pytest.param([1, 2], {"max_new_tokens": 0}, 400, "invalid_value", id="no output"),
        pytest.param([1, 2], {"max_new_tokens": 4095}, 400, "context_length_exceeded", id="beyond the context"),
        pytest.param([1] * 3000, {"max_new_tokens": 4}, 500, "engine_failure", id="larger than the pool"),
    ],
)
def test_what_could_harm_the_scheduler_is_refused_with_one_row(prompt: list[int], settings: dict[str, int], status: int, code: str) -> None:
    h = Harness(max_total_tokens=2048)
    h.send("bad", prompt, **settings)
    h.send("good", [1, 2], 4)
    h.run()
    assert h.abort_code("bad") == (status, code)
    assert len(h.outbox.rows["bad"]) == 1
    assert h.output("good") == [1, 2, 1, 2]
    h.assert_at_baseline()


def test_a_burst_fills_the_rows_and_the_queue_before_anyone_is_refused() -> None:
    h = Harness(max_running_requests=2, max_queued_requests=2)
    for i in range(5):
        h.send(f"r{i}", [1, 2], 3)
    h.run()
    assert h.abort_code("r4") == (429, "queue_full")
    assert all(h.reason(f"r{i}") == FinishLength(3) for i in range(4))


def test_one_more_than_the_queue_holds_is_refused() -> None:
    h = Harness(max_running_requests=2, max_queued_requests=3)
    for i in range(2):
        h.send(f"running{i}", [1, 2], 30)
    h.turn()
    for i in range(4):
        h.send(f"waiting{i}", [1, 2], 3)
    h.run()
    assert h.abort_code("waiting3") == (429, "queue_full")
    assert all(h.reason(f"waiting{i}") == FinishLength(3) for i in range(3))
    h.assert_at_baseline()


def test_invalid_logits_end_their_row_and_what_it_computed_then_is_not_cached() -> None:
    h = Harness(options="nan_token=66")
    h.send("at once", [66, *range(1, 40)], 9)
    h.send("later", [*range(1, 20), 66], 30)
    h.send("good", [1, 2, 3], 9)
    h.run()
    assert h.abort_code("at once") == h.abort_code("later") == (500, "invalid_logits")
    assert (h.output("at once"), h.output("later")) == ([], [*range(1, 20)])
    assert h.output("good") == echo([1, 2, 3], 9)
    assert h.scheduler.ledger.cache.evictable_size == 32  # a page of "later"'s prompt, cached before the fault, and that of "good"
    h.assert_at_baseline()


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_token_that_comes_without_the_logprobs_asked_for_ends_its_request_alone(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(params: SamplingParams, position: int, token: int) -> TokenLogprobs | None:
        return None if params.top_logprobs_num == 7 and position == 3 + tokens else scripted_logprobs(params, position, token)

    monkeypatch.setattr(scripted, "scripted_logprobs", forgetful)
    h = Harness()
    h.send("bad", [1, 2, 3], 9, return_logprob=True, top_logprobs_num=7)
    h.send("good", [1, 2, 4], 9, return_logprob=True)
    h.run()
    assert h.abort_code("bad") == (FAULT.status_code, FAULT.code)
    assert h.output("bad") == echo([1, 2, 3], tokens)
    assert h.output("good") == echo([1, 2, 4], 9)
    h.assert_at_baseline()


@pytest.mark.parametrize("chunk", [0, 7, 64])
def test_a_step_that_fails_ends_the_row_at_fault_and_no_other(chunk: int) -> None:
    """Decodes before and behind it, a prefill between two chunks, and one whose last chunk fails."""
    h = Harness(options="raise_token=66", chunked_prefill_size=chunk)
    h.send("before", [1, 2, 3], 40)
    h.send("bad", [1, 2, 3, 4, 5, 66], 40)
    h.send("behind", [4, 5, 6], 40)
    h.run_until("behind", ReqState.RUNNING)
    h.send("long", LONG, 9)
    h.send("bad at once", [66, 1, 2], 9)
    h.run()
    assert h.abort_code("bad") == h.abort_code("bad at once") == (500, "engine_crashed")
    assert (h.output("bad"), h.output("bad at once")) == ([1, 2, 3, 4, 5], [])
    assert h.output("before") == echo([1, 2, 3], 40)
    assert h.output("behind") == echo([4, 5, 6], 40)
    assert h.output("long") == echo(LONG, 9)
    h.assert_at_baseline()


def test_a_failed_step_costs_as_many_steps_more_as_it_had_rows() -> None:
    def steps(options: str) -> int:
        h = Harness(options=options)
        h.send("bad", [1, 2, 3, 66], 9)
        for i in range(5):
            h.send(f"r{i}", [4 + i, 5], 9)
        h.run()
        assert h.outbox.stats is not None
        return h.outbox.stats.steps_total

    assert steps("raise_token=66") == steps("") + 6


@pytest.mark.parametrize("where", ["submit", "result"])
def test_a_step_that_fails_once_costs_nobody_a_token(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has sampled when it fails: every sampler's state is a token ahead, and must be made again."""
    h = Harness()
    for i in range(4):
        h.send(f"r{i}", [10 + i, 20 + i, 30], 20)
    h.run_until("r3", ReqState.RUNNING)
    submit = h.executor.submit
    failures: list[str] = []

    class Failing:
        def __init__(self, handle: StepHandle) -> None:
            self.handle = handle

        def result(self) -> None:
            self.handle.result()
            raise RuntimeError("the device is away")

    def fail_once(batch: ForwardBatch) -> object:
        handle = submit(batch)
        if failures:
            return handle
        failures.append(where)
        if where == "result":
            return Failing(handle)
        handle.result()
        raise RuntimeError("the device is away")

    monkeypatch.setattr(h.executor, "submit", fail_once)
    h.run()
    assert failures == [where]
    assert [h.output(f"r{i}") for i in range(4)] == [echo([10 + i, 20 + i, 30], 20) for i in range(4)]
    h.assert_at_baseline()


def test_what_a_request_computed_outlives_it_unless_a_fault_ended_it() -> None:
    h = Harness(max_total_tokens=64)
    h.send("outgrows the pool", [1, 2, 3] * 8, 200)
    h.run()
    assert h.abort_code("outgrows the pool") == (500, "engine_failure")
    assert h.scheduler.ledger.cache.evictable_size == 64  # prompt and output
    h = Harness()
    h.send("aborted", [1, 2, 3] * 8, 200)
    for _ in range(20):
        h.turn()
    h.abort("aborted")
    h.run()
    assert h.scheduler.ledger.cache.evictable_size == 48
    h = Harness(options="raise_token=66")
    h.send("ended by a fault", [*range(1, 33), 66], 200)
    h.run()
    assert h.abort_code("ended by a fault") == (500, "engine_crashed")
    assert h.scheduler.ledger.cache.evictable_size == 32  # of its prompt, cached before


def test_a_row_without_a_valid_token_counts_for_no_output() -> None:
    h = Harness(options="nan_token=66")
    h.send("bad", [1, 2, 66], 9)
    h.send("bad at once", [66, 1], 9)
    h.send("good", [1, 2, 3], 9)
    h.run()
    assert h.outbox.stats is not None
    assert h.outbox.stats.output_tokens_total == 2 + 0 + 9


def test_a_sampler_that_cannot_be_made_ends_one_request() -> None:
    h = Harness(options="fail_bind_token=66")
    h.send("bad", [66, 1, 2], 9)
    h.send("good", [1, 2, 3], 9)
    h.run()
    assert h.abort_code("bad") == (500, "engine_failure")
    assert h.output("good") == echo([1, 2, 3], 9)
    h.assert_at_baseline()


def test_a_fault_in_one_requests_stop_matching_ends_that_request() -> None:
    h = Harness()
    h.send("bad", list(b"some text"), 20, stop=("xyz",))
    h.send("good", list(b"some text"), 20)
    h.turn()
    stops = h.scheduler.reqs["bad"].text_stops
    assert stops is not None
    stops.push = None  # type: ignore[method-assign, assignment]
    h.run()
    assert h.abort_code("bad") == (500, "engine_failure")
    assert h.output("good") == echo(list(b"some text"), 20)
    h.assert_at_baseline()


def test_a_fault_at_intake_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    monkeypatch.setattr(h.scheduler, "_tokenizer", lambda: 1 / 0)
    h.send("bad", [1, 2, 3], 4, stop=("x",))
    h.send("good", [1, 2, 3], 4)
    h.run()
    assert h.abort_code("bad") == (500, "engine_failure")
    assert h.output("good") == echo([1, 2, 3], 4)
    h.assert_at_baseline()


def test_shutdown_gives_everyone_alive_an_ending() -> None:
    h = Harness(max_running_requests=2)
    for i in range(5):
        h.send(f"r{i}", [1, 2], 100)
    h.turn()
    h.inbox.messages.append(ShutdownReq())
    h.scheduler.main_loop()
    assert all(h.abort_code(f"r{i}") == (503, "draining") for i in range(5))
    h.assert_at_baseline()


def test_without_credit_the_scheduler_takes_no_step_but_still_receives() -> None:
    h = Harness()
    h.send("a", [1, 2], 1000)
    h.scheduler.receive()
    for _ in range(100):
        h.scheduler.step()
    assert h.outbox.batches == MAX_BATCHES_IN_FLIGHT
    assert len(h.output("a")) == MAX_BATCHES_IN_FLIGHT
    h.send("b", [3, 4], 5)
    h.abort("a")
    h.scheduler.receive()
    h.scheduler.step()
    assert h.outbox.batches == MAX_BATCHES_IN_FLIGHT
    assert set(h.scheduler.reqs) == {"b"}
    h.inbox.messages.append(OutputCredit(batches=MAX_BATCHES_IN_FLIGHT))
    h.run()
    assert aborted(h, "a")
    assert h.output("b") == echo([3, 4], 5)
    h.assert_at_baseline()
