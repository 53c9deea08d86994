"""Sharing, retraction, and the books."""

import random

import numpy as np
import pytest

from sterna.executor.base import ForwardBatch, StepHandle
from sterna.protocol.control import FlushCacheOutput, FlushCacheReq
from sterna.protocol.finish import FinishLength
from sterna.scheduler.invariants import InvariantViolation, check_counts, check_ownership
from sterna.scheduler.prefill import Followers, NewTokenRatio
from sterna.scheduler.req import ReqState
from unit.scheduler.harness import Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")

PAGE = 16


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 900) for _ in range(length)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_continuation_finds_all_of_prompt_and_output_that_was_computed(page_size: int) -> None:
    h = Harness(page_size=page_size)
    prompt = prompt_of(0, 100)
    h.send("first", prompt, 50)
    h.run()
    h.send("next", prompt + h.output("first") + prompt_of(1, 50), 5)
    h.run()
    assert h.cached("next") == 149  # the last output was sampled, and nothing computed on top of it
    h.assert_at_baseline()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_continuation_finds_only_the_prompt_where_generated_kv_is_not_reusable(page_size: int) -> None:
    h = Harness(page_size=page_size, options="reuse_generated_kv=0")
    prompt = prompt_of(0, 100)
    h.send("first", prompt, 50)
    h.run()
    h.send("next", prompt + h.output("first") + prompt_of(1, 50), 5)
    h.run()
    assert h.cached("next") == 100
    assert h.output("next") == prompt[:5]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
def test_warm_gives_what_cold_gave_at_every_page_boundary(length: int, chunk: int) -> None:
    h = Harness(chunked_prefill_size=chunk)
    prompt = prompt_of(length, length)
    for rid in ("cold", "warm"):
        h.send(rid, prompt, 40)
        h.run()
        assert h.output(rid) == echo(prompt, 40)
    assert h.cached("cold") == 0
    assert h.cached("warm") == length - 1  # never the last token: its logits are needed
    h.assert_at_baseline()


def test_no_prefix_crosses_a_namespace() -> None:
    h = Harness()
    prompt = prompt_of(0, 100)
    for rid, salt in (("a", "x"), ("other", "y"), ("none", ""), ("same", "x")):
        h.send(rid, prompt, 4, salt=salt)
        h.run()
    assert [h.cached(rid) for rid in ("a", "other", "none")] == [0, 0, 0]
    assert h.cached("same") == 99


def test_markers_never_cross_conversations_under_eviction() -> None:
    rng = random.Random(5)
    h = Harness(max_total_tokens=1024, max_running_requests=8, chunked_prefill_size=32)
    history = {c: [c, c, c, *prompt_of(c, 20)] for c in range(12)}
    for turn in range(60):
        for c in rng.sample(sorted(history), 4):
            h.send(f"{c}.{turn}", history[c], 12)
        h.run()
        for rid in [rid for rid in h.outbox.rows if rid.endswith(f".{turn}")]:
            c = int(rid.split(".")[0])
            assert h.output(rid) == echo(history[c], 12)
            history[c] = (history[c] + h.output(rid))[:400]
    assert h.outbox.stats is not None
    assert h.outbox.stats.cached_tokens_total > 0
    assert sum(map(len, history.values())) > 1024  # so something was evicted
    h.assert_at_baseline()


@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("radix", [True, False])
def test_retracted_requests_resume_with_nothing_lost(reuse: int, radix: bool) -> None:
    h = Harness(max_total_tokens=512, radix_cache=radix, chunked_prefill_size=24, options=f"reuse_generated_kv={reuse}")
    prompts = {f"r{i}": prompt_of(i, 10 + i) for i in range(12)}
    for rid, prompt in prompts.items():
        h.send(rid, prompt, 120)
    h.run()
    for rid, prompt in prompts.items():
        assert h.output(rid) == echo(prompt, 120)
        assert h.reason(rid) == FinishLength(120)
    assert h.outbox.stats is not None
    assert h.outbox.stats.retractions_total > 0
    assert any(h.outbox.rows[rid][-1].times.retractions for rid in prompts)  # type: ignore[union-attr]
    h.assert_at_baseline()


def test_a_retracted_request_goes_to_the_queues_front_and_is_never_told_that_it_is_full() -> None:
    h = Harness(max_total_tokens=160, max_queued_requests=2, max_running_requests=4)
    for i in range(4):
        h.send(f"r{i}", prompt_of(i, 16), 60)
    h.scheduler.prefill.ratio.value = 0.0  # admit more than memory will hold
    h.turn()
    h.send("late", prompt_of(9, 16), 10)
    h.send("later", prompt_of(10, 16), 10)
    seen = False
    while h.scheduler.reqs or h.inbox.messages:
        h.turn()
        waiting = list(h.scheduler.prefill.waiting)
        retracted = [req for req in waiting if req.retractions]
        assert waiting[: len(retracted)] == retracted
        seen |= bool(retracted) and len(waiting) > len(retracted)
        if not h.scheduler.reqs:
            break
    assert seen, "nobody was retracted while others waited"
    for rid in (*(f"r{i}" for i in range(4)), "late", "later"):
        assert isinstance(h.reason(rid), FinishLength)
    h.assert_at_baseline()


@pytest.mark.parametrize(
    ("priority_of_old", "retracted", "spared"),
    [(0, "young", "old"), (-1, "old", "young")],
    ids=["fewest outputs", "lowest priority, however much it has said"],
)
def test_who_is_retracted_first(priority_of_old: int, retracted: str, spared: str) -> None:
    h = Harness(max_total_tokens=128, radix_cache=False, schedule_policy="priority")
    prompts = {"old": prompt_of(0, 16), "young": prompt_of(1, 16)}
    lengths = {"old": 100, "young": 50}
    h.send("old", prompts["old"], lengths["old"], priority=priority_of_old)
    for _ in range(30):
        h.turn()
    h.scheduler.prefill.ratio.value = NewTokenRatio.FLOOR
    h.send("young", prompts["young"], lengths["young"])
    h.run_until("young", ReqState.RUNNING)
    h.run()
    times = {rid: h.outbox.rows[rid][-1].times for rid in prompts}
    assert times[retracted].retractions > 0  # type: ignore[union-attr]
    assert times[spared].retractions == 0  # type: ignore[union-attr]
    assert h.output(retracted) == echo(prompts[retracted], lengths[retracted])


def test_a_request_that_outgrows_the_pool_alone_is_ended_and_others_go_on() -> None:
    h = Harness(max_total_tokens=64)
    h.send("big", prompt_of(0, 20), 200)
    h.send("small", prompt_of(1, 20), 10)
    h.run()
    assert h.abort_code("big") == (500, "engine_failure")
    assert h.output("small") == echo(prompt_of(1, 20), 10)
    h.assert_at_baseline()


def test_two_requests_that_each_outgrow_the_pool_both_end() -> None:
    h = Harness(max_total_tokens=64, radix_cache=False)
    for rid in ("a", "b"):
        h.send(rid, prompt_of(0, 20), 200)
    h.scheduler.prefill.ratio.value = 0.0
    h.run()
    assert h.abort_code("a") == h.abort_code("b") == (500, "engine_failure")
    h.assert_at_baseline()


def test_a_request_resumes_from_the_outputs_that_the_server_has() -> None:
    h = Harness()
    prompt = prompt_of(0, 30)
    h.send("a", prompt, 50, resume=prompt[:20])
    h.run()
    assert h.outbox.rows["a"][0].start == 20
    assert h.output("a") == echo(prompt, 50)[20:]
    assert h.reason("a") == FinishLength(50)
    h.assert_at_baseline()


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    h = Harness(chunked_prefill_size=64)
    shared = prompt_of(0, 320)
    for i in range(16):
        h.send(f"r{i}", shared + prompt_of(100 + i, 10), 5)
    h.run()
    for i in range(16):
        assert h.output(f"r{i}") == echo(shared, 5)
    assert [h.cached(f"r{i}") for i in range(16)] == [0] + [320] * 15
    h.assert_at_baseline()


def test_a_follower_goes_on_when_it_has_waited_long_enough_though_its_leader_is_not_done() -> None:
    h = Harness(options="overlap=0")
    prompt = prompt_of(0, 40)
    h.send("leader", prompt, 40, resume=prompt[:20])  # two steps: its prompt, then what it had generated
    h.send("follower", [*prompt, 7], 4)
    h.turn()
    assert h.scheduler.prefill.num_waiting == 1
    h.turn()
    assert h.output("follower") == prompt[:1]
    h.run()
    assert h.cached("follower") == 32
    assert h.output("leader") == echo(prompt, 40)[20:]
    h.assert_at_baseline()


def test_replayed_outputs_never_come_from_a_prompts_kv_where_the_two_differ() -> None:
    h = Harness(options="reuse_generated_kv=0")
    prompt = prompt_of(0, 40)
    h.send("as a prompt", prompt + prompt[:30], 1)
    h.run()
    h.send("as output", prompt, 40, resume=prompt[:30])
    h.run()
    assert h.output("as output") == prompt[30:40]
    assert h.cached("as output") == 40


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 40])
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_who_leaves_a_cached_prompt_within_a_page_computes_nothing_that_is_shared(shared: int, page_size: int, chunk: int) -> None:
    h = Harness(page_size=page_size, chunked_prefill_size=chunk)
    stem = prompt_of(0, shared)
    prompts = {rid: [*stem, own, *prompt_of(own, 30)] for rid, own in (("first", 1), ("second", 2), ("third", 3))}
    h.send("first", prompts["first"], 20)
    h.run()
    h.send("second", prompts["second"], 20)
    h.send("third", prompts["third"], 20)
    h.run()
    for rid, prompt in prompts.items():
        assert h.output(rid) == echo(prompt, 20)
    assert h.cached("second") == h.cached("third") == shared
    h.assert_at_baseline()


def test_of_several_pages_that_which_has_most_in_common_is_copied() -> None:
    h = Harness()
    stem = prompt_of(0, 2 * PAGE)
    for common in (3, 11, 7):
        h.send(f"{common}", [*stem[: PAGE + common], *prompt_of(common, 40)], 4)
        h.run()
    h.send("last", [*stem, 5], 4)
    h.run()
    assert h.cached("last") == PAGE + 11
    h.assert_at_baseline()


def test_where_memory_is_too_short_to_hold_the_page_its_beginning_is_computed() -> None:
    h = Harness(max_total_tokens=4 * PAGE)
    stem = prompt_of(0, PAGE + 4)
    h.send("first", [*stem, *prompt_of(1, 20)], 1)
    h.run()
    prompt = [*stem, *prompt_of(2, 4 * PAGE - len(stem) - 2)]
    h.send("all of memory", prompt, 2)
    h.run()
    assert h.output("all of memory") == echo(prompt, 2)
    assert h.cached("all of memory") == PAGE
    h.assert_at_baseline()


def test_a_page_that_is_copied_is_held_until_that_is_done_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(options="overlap=0", chunked_prefill_size=16)
    stem = prompt_of(0, PAGE + 4)
    h.send("first", [*stem, *prompt_of(1, 40)], 1)
    h.run()
    cache, executor = h.scheduler.ledger.cache, h.scheduler.executor
    submit, held = executor.submit, []

    def watched(batch: ForwardBatch) -> StepHandle:
        held.append((len(batch.groups[0].copied_from), cache.protected_size))
        return submit(batch)

    monkeypatch.setattr(executor, "submit", watched)
    h.send("second", [*stem, *prompt_of(2, 40)], 1)
    h.run()
    # The later steps' lock is on the prefix and pages of its own.
    assert held == [(1, 2 * PAGE), (0, 2 * PAGE), (0, 3 * PAGE)]
    assert cache.protected_size == 0
    h.assert_at_baseline()


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_prompt_that_ends_in_the_page_that_it_copies_runs_to_the_end_of_memory(chunk: int) -> None:
    h = Harness(max_total_tokens=4 * PAGE, chunked_prefill_size=chunk)
    stem = prompt_of(0, 4)
    h.send("first", [*stem, *prompt_of(1, 20)], 1)
    h.run()
    prompt = [*stem, *prompt_of(2, 6)]
    h.send("second", prompt, 4 * PAGE - 10)
    h.run()
    assert h.cached("second") == 4
    assert h.output("second") == echo(prompt, 4 * PAGE - 10)
    h.assert_at_baseline()


@pytest.mark.parametrize(("chunk_size", "steps"), [(16, 4), (60, 2), (64, 1), (0, 1)])
def test_waiting_for_a_prefix_takes_no_longer_than_computing_it_alone(chunk_size: int, steps: int) -> None:
    h = Harness()
    shared = prompt_of(0, 64)
    h.send("leader", shared + prompt_of(1, 300), 1)
    h.send("follower", [*shared, 7], 1)
    h.scheduler.receive()
    leader, follower = h.scheduler.reqs["leader"], h.scheduler.reqs["follower"]
    followers = Followers(h.scheduler.ledger)
    followers.lead(leader)
    assert followers.follow(follower, 0, chunk_size, 10)
    assert followers.due(10 + steps - 1) == []
    assert followers.due(10 + steps) == [follower]
    assert not followers.follow(follower, 0, chunk_size, 10 + steps), "it waits once"
    assert followers.dismiss(leader) == []


def test_without_a_chunk_size_no_prompt_is_split() -> None:
    h = Harness(chunked_prefill_size=0, context_len=32_768)
    for i in range(3):
        h.send(f"r{i}", prompt_of(i, 12_000), 2)
    h.run()
    assert [h.outbox.rows[f"r{i}"][-1].times.chunks for i in range(3)] == [1, 1, 1]  # type: ignore[union-attr]


def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    order: dict[str, list[str]] = {}
    for policy in ("lpm", "fcfs"):
        h = Harness(schedule_policy=policy, max_running_requests=1)
        cached = prompt_of(0, 64)
        h.send("warm-up", cached, 1)
        h.run()
        h.send("busy", [1, 2, 3], 5)
        h.turn()
        h.send("cold", prompt_of(1, 64), 1)
        h.send("warm", cached, 1)
        h.run()
        order[policy] = [rid for rid in h.outbox.rows if rid in ("cold", "warm")]
    assert order == {"lpm": ["warm", "cold"], "fcfs": ["cold", "warm"]}


def test_lpm_matches_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's head has a row but no memory, turn after turn."""
    h = Harness(schedule_policy="lpm", max_total_tokens=256)
    h.send("running", prompt_of(0, 64), 100)
    h.run_until("running", ReqState.RUNNING)
    for i in range(20):
        h.send(f"r{i}", prompt_of(1 + i, 128), 60)
    h.turn()
    assert h.scheduler.prefill.num_waiting == 20
    matched: list[int] = []
    cache = h.scheduler.ledger.cache
    match_length = cache.match_length
    monkeypatch.setattr(cache, "match_length", lambda *args: (matched.append(1), match_length(*args))[1])
    for _ in range(5):
        h.turn()
    assert h.scheduler.prefill.num_waiting == 20
    assert not matched
    h.send("new", prompt_of(50, 128), 60)
    h.turn()
    assert len(matched) == 21


def test_flush_drops_what_nobody_holds() -> None:
    h = Harness()
    h.send("done", prompt_of(0, 64), 1)
    h.run()
    h.send("live", prompt_of(1, 64), 100)
    h.run_until("live", ReqState.RUNNING)
    h.inbox.messages.append(FlushCacheReq(control_id=3, reply_to="ipc://asker"))
    h.run()
    assert h.outbox.control == [("ipc://asker", FlushCacheOutput(control_id=3, flushed_tokens=64))]
    assert h.output("live") == echo(prompt_of(1, 64), 100)


def test_violated_books_are_detected() -> None:
    h = Harness(max_total_tokens=1024)
    h.send("a", prompt_of(0, 40), 50)
    h.send("b", prompt_of(1, 40), 50)
    h.run_until("b", ReqState.RUNNING)
    ledger, reqs = h.scheduler.ledger, h.scheduler.reqs
    check_ownership(ledger, reqs.values())

    ledger.owned[0] += PAGE  # a page that is counted and isn't there
    with pytest.raises(InvariantViolation):
        check_counts(ledger)
    ledger.owned[0] -= PAGE

    lost = ledger.pools.alloc(1)  # a page that nobody owns
    ledger.owned[0] += PAGE
    check_counts(ledger)
    with pytest.raises(InvariantViolation, match="0 owners"):
        check_ownership(ledger, reqs.values())
    ledger.pools.free(lost)
    ledger.owned[0] -= PAGE

    table = ledger.tables.tables[0]
    a, b = reqs["a"], reqs["b"]
    own = table[a.req_pool_idx].copy()
    table[a.req_pool_idx, a.tree_len] = table[b.req_pool_idx, b.tree_len]  # a slot with two owners
    with pytest.raises(InvariantViolation, match="owners"):
        check_ownership(ledger, reqs.values())
    table[a.req_pool_idx] = own

    table[a.req_pool_idx, 0] = table[a.req_pool_idx, a.tree_len]  # a prefix that isn't the cache's
    with pytest.raises(InvariantViolation, match="prefix"):
        check_ownership(ledger, reqs.values())
    table[a.req_pool_idx] = own
    check_ownership(ledger, reqs.values())


def test_the_engine_notices_a_slot_that_holds_somebody_elses_token() -> None:
    h = Harness(max_total_tokens=1024)
    h.send("a", prompt_of(0, 40), 50)
    h.run_until("a", ReqState.RUNNING)
    table = h.scheduler.ledger.tables.tables[0]
    row = h.scheduler.reqs["a"].req_pool_idx
    table[row, :2] = table[row, :2][::-1].copy()
    h.scheduler._check_every_slot = False
    h.turn()
    assert h.abort_code("a") == (500, "engine_crashed")
    assert np.array_equal(h.output("a"), echo(prompt_of(0, 40), len(h.output("a"))))


def test_the_expected_output_share_falls_in_600_steps_and_rises_with_a_retraction() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == 0.7
    for _ in range(600):
        ratio.step()
    assert ratio.value == pytest.approx(0.098)
    ratio.step()
    assert ratio.value == pytest.approx(0.098)


def test_a_fault_in_admission_ends_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    h.send("bad", prompt_of(0, 64), 4)
    h.send("good", prompt_of(1, 64), 4)
    match = h.scheduler.ledger.match
    monkeypatch.setattr(h.scheduler.ledger, "match", lambda req: 1 / 0 if req.rid == "bad" else match(req))
    h.run()
    assert h.abort_code("bad") == (500, "engine_failure")
    assert h.output("good") == prompt_of(1, 64)[:4]
    h.assert_at_baseline()


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("max_running", [1, 8])
def test_nobody_starves_behind_or_before_those_that_cannot_fit(page_size: int, max_running: int) -> None:
    """Small ones around one that fits only alone, one that fills the pool to its last slot, and ones that outgrow or exceed it."""
    pool = 256
    h = Harness(page_size=page_size, max_total_tokens=pool, max_running_requests=max_running, chunked_prefill_size=24)
    small = {f"small{i}": prompt_of(i, 20 + i) for i in range(12)}
    big = {"alone": (prompt_of(50, 200), 40), "brim": (prompt_of(51, pool), 1), "outgrows": (prompt_of(52, 200), 100)}
    for i, (rid, prompt) in enumerate(small.items()):
        h.send(rid, prompt, 30)
        if i == 4:
            for name, (ids, count) in big.items():
                h.send(name, ids, count)
            h.send("exceeds", prompt_of(53, pool + 1), 1)
    h.run()
    for rid, prompt in small.items():
        assert h.output(rid) == echo(prompt, 30)
    for rid in ("alone", "brim"):
        assert h.output(rid) == echo(*big[rid])
    assert h.abort_code("outgrows") == h.abort_code("exceeds") == (500, "engine_failure")
    assert len(h.output("outgrows")) == pool - 200 + 1  # the last token's KV is never needed
    order = [rid for rid in h.outbox.rows if h.output(rid)]
    assert order.index("alone") < order.index("small11"), "a small one that came later passed one that had to wait for memory"
    h.assert_at_baseline()
