"""Steps that fail while others are in flight: their rows are run again, only culprits end, and what was built on them is dropped."""

import pytest

from sterna.executor.base import ForwardBatch, StepHandle, StepOutput
from sterna.protocol.finish import FinishLength
from sterna.scheduler.decode import Decodes
from sterna.scheduler.req import Req
from unit.scheduler.gates import LONG, MOMENTS, Moment, close, overlapped
from unit.scheduler.harness import Harness, echo


def fail(h: Harness, steps: set[int], *, at: str) -> list[int]:
    """These steps fail, each once: as they are submitted, or when they are read, having run. Returns the list of those that did."""
    submit, failed = h.executor.submit, []

    class Failing:
        def __init__(self, step: int, handle: StepHandle) -> None:
            self.step, self.handle = step, handle

        def result(self) -> StepOutput:
            self.handle.result()
            failed.append(self.step)
            raise RuntimeError("the device is away")

    def failing(batch: ForwardBatch) -> StepHandle:
        if batch.step in steps and at == "submit":
            failed.append(batch.step)
            raise RuntimeError("the device is away")
        handle = submit(batch)
        return Failing(batch.step, handle) if batch.step in steps else handle

    h.executor.submit = failing  # type: ignore[method-assign, assignment]
    return failed


@MOMENTS
@pytest.mark.parametrize("at", ["submit", "result"])
@pytest.mark.parametrize("steps", [{0}, {1}, {4}, {4, 5}, {4, 7, 9}, set(range(3, 30))])
def test_a_step_that_fails_while_another_is_in_flight_costs_nobody_a_token(steps: set[int], at: str, moment: Moment) -> None:
    """Whoever is in a step that fails with others is run again; who fails alone too ends: in the last set all."""
    h, _, _ = overlapped(moment=moment, chunked_prefill_size=40)
    failed = fail(h, steps, at=at)
    for i in range(3):
        h.send(f"r{i}", [10 + i, 20 + i, 30], 20)
    h.send("long", LONG, 8)
    h.run()
    assert failed[:2] == sorted(steps)[:2]
    crowd = {**{f"r{i}": ([10 + i, 20 + i, 30], 20) for i in range(3)}, "long": (LONG, 8)}
    ended = [rid for rid in crowd if not isinstance(h.reason(rid), FinishLength)]
    assert len(ended) < len(failed), "the first one ended nobody"
    assert (ended == list(crowd)) == (len(steps) > 10)
    for rid, (prompt, count) in crowd.items():
        assert h.output(rid) == echo(prompt, len(h.output(rid)) if rid in ended else count)
    close(h)


@MOMENTS
def test_rows_that_are_only_in_the_step_on_top_of_a_failed_one_are_as_they_were(moment: Moment) -> None:
    """One has sampled there, one is between two chunks: neither took anything from the step that failed."""
    h, _, log = overlapped(moment=moment, chunked_prefill_size=40)
    failed = fail(h, {0}, at="result")
    h.send("first", [1, 2, 3], 6)
    h.turn()
    h.send("sampled", [4, 5, 6], 6)
    h.send("halved", LONG, 6)
    h.run()
    assert failed == [0]
    on_top = log.batches[1]
    assert (on_top.num_rows, on_top.seq_lens.tolist()) == (3, [4, 3, 37])
    assert [h.output(rid) for rid in ("first", "sampled", "halved")] == [echo([1, 2, 3], 6), echo([4, 5, 6], 6), LONG[:6]]
    close(h)


def test_the_step_on_top_of_a_failed_one_may_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took no token of the failed one, so it sampled: what it gave is dropped all the same."""
    h, gates, _ = overlapped(chunked_prefill_size=40)
    failed = fail(h, {0}, at="result")
    h.send("first", LONG[:80], 3)
    h.turn()
    monkeypatch.setattr(h.scheduler.prefill, "active", [])  # it sits the next step out
    h.send("sampled", [4, 5, 6], 6)
    first = h.scheduler.reqs["first"]
    h.scheduler.receive()
    h.scheduler.admit()
    batch = h.scheduler.choose()
    h.scheduler.prefill.active.insert(0, first)
    assert batch is not None
    h.scheduler.take(leave=h.scheduler.submit(batch))
    assert failed == [0]
    assert h.scheduler.reqs["sampled"].output_ids == []
    assert gates.num_sampled > 0
    h.run()
    assert (h.output("first"), h.output("sampled")) == (LONG[:3], echo([4, 5, 6], 6))
    close(h)


def test_a_running_row_that_sat_out_the_failed_step_is_as_it_was_too(monkeypatch: pytest.MonkeyPatch) -> None:
    h, _, log = overlapped()
    failed = fail(h, {5}, at="result")
    for rid in ("a", "b"):
        h.send(rid, [1, 2, 3], 12)
    next_decodes = h.scheduler.running.next_decodes

    def without_b_in_the_fifth(fresh: list[Req]) -> Decodes:
        decodes = next_decodes(fresh)
        return decodes.only([0]) if h.scheduler._runner.count == 5 else decodes

    monkeypatch.setattr(h.scheduler.running, "next_decodes", without_b_in_the_fifth)
    h.run()
    assert failed == [5]
    assert [batch.num_rows for batch in log.batches[4:7]] == [2, 1, 2]
    assert h.output("a") == h.output("b") == echo([1, 2, 3], 12)
    close(h)


def test_nothing_is_submitted_on_top_of_a_step_that_could_not_be() -> None:
    h, _, log = overlapped()
    fail(h, {3}, at="submit")
    h.send("a", [1, 2, 3], 9)
    h.run()
    assert h.output("a") == echo([1, 2, 3], 9)
    assert len(log.batches) == 9, "each step once, and the failed one alone"
    assert log.on_top() == [1, 2, 6, 7, 8, 9]
    close(h)


@pytest.mark.parametrize("at", ["first in the step below", "first in the step on top", "both"])
def test_the_culprits_of_two_steps_in_flight_end_and_nobody_else(at: str) -> None:
    """Two rows raise: in one step, in the one after it, or one in each."""
    h, _, _ = overlapped("raise_token=66")
    below = [1, 2, 66] if at != "first in the step on top" else [1, 2, 3, 66]
    above = [4, 5, 6, 66] if at != "first in the step below" else [4, 5, 66]
    h.send("below", below, 20)
    h.send("good", [7, 8, 9], 20)
    h.send("above", above, 20)
    h.run()
    assert h.abort_code("below") == h.abort_code("above") == (500, "engine_crashed")
    assert (h.output("below"), h.output("above")) == (below[:-1], above[:-1])
    assert h.output("good") == echo([7, 8, 9], 20)
    close(h)


@MOMENTS
def test_whoever_is_aborted_in_a_step_that_then_fails_is_not_run_again(moment: Moment) -> None:
    h, _, log = overlapped(moment=moment)
    fail(h, {4}, at="result")
    for rid in ("a", "b"):
        h.send(rid, [1, 2, 3], 9)
    while h.scheduler._runner.count < 5:
        h.turn()
    h.abort("a")
    h.turn()
    h.run()
    assert h.reason("a").code == "aborted"  # type: ignore[union-attr]
    assert h.output("b") == echo([1, 2, 3], 9)
    assert [batch.req_pool_idx.tolist() for batch in log.batches if batch.step in (4, 5, 6)] == [[0, 1], [1], [1]]
    close(h)
