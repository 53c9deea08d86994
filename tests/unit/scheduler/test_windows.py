"""KV groups with a window: what a request holds, what is found again, and what happens where one pool or the other runs short."""

from __future__ import annotations

import random

import pytest

from sterna.mem_cache.window import least_window_tokens, most_window_tokens
from sterna.protocol.finish import FinishLength
from sterna.scheduler.req import ReqState
from unit.scheduler.harness import Harness, echo

pytestmark = pytest.mark.usefixtures("either_way")

WINDOW = 20


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 900) for _ in range(length)]


def held(h: Harness, rid: str, window: int = 0) -> int:
    """Slots that the request holds in the `window`-th group that has one."""
    req = h.scheduler.reqs[rid]
    return req.allocated_len - req.window_starts[window]


def obtained(h: Harness) -> list[int]:
    """Per group, slots that requests hold or own."""
    ledger = h.scheduler.ledger
    return [ledger.owned[group] + ledger.cache.protected(group) for group in range(len(ledger.owned))]


@pytest.mark.parametrize("radix_cache", [True, False])
@pytest.mark.parametrize("reuse", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [3, 32, 0])
def test_what_a_request_holds_does_not_grow_with_its_length(chunk: int, page_size: int, reuse: int, radix_cache: bool) -> None:
    options = f"windows=0:{WINDOW},reuse_generated_kv={reuse}"
    h = Harness(page_size=page_size, chunked_prefill_size=chunk, options=options, radix_cache=radix_cache)
    prompt = prompt_of(0, 4 * WINDOW)
    h.send("a", prompt, 4 * WINDOW)
    most = 0
    while True:
        h.turn()
        if "a" not in h.scheduler.reqs:
            break
        most = max(most, held(h, "a"))
        assert obtained(h)[1] == held(h, "a")
    assert WINDOW - 1 <= most <= most_window_tokens(WINDOW, chunk or len(prompt), page_size)
    assert h.output("a") == echo(prompt, 4 * WINDOW)
    h.assert_at_baseline()


def test_layers_that_all_have_windows_serve_contexts_far_longer_than_their_pool() -> None:
    slots = least_window_tokens(WINDOW, 4)
    h = Harness(options=f"windows={WINDOW}", max_total_tokens=slots, page_size=4, chunked_prefill_size=64)
    prompt = prompt_of(0, 500)
    for rid in ("cold", "again"):
        h.send(rid, prompt, 300)
        h.run()
        assert h.output(rid) == echo(prompt, 300)
    assert len(prompt) > 10 * slots
    h.assert_at_baseline()


def test_a_pool_too_small_for_a_window_still_serves_what_fits_it_and_refuses_what_does_not() -> None:
    h = Harness(options="windows=64", max_total_tokens=32, page_size=4)
    h.send("fits", prompt_of(0, 20), 12)
    h.send("too long", prompt_of(1, 33), 1)
    h.send("outgrows", prompt_of(2, 20), 40)
    h.run()
    assert h.output("fits") == echo(prompt_of(0, 20), 12)
    assert h.abort_code("too long") == h.abort_code("outgrows") == (500, "engine_failure")
    h.assert_at_baseline()


@pytest.mark.parametrize("groups", ["0:20", "20", "0:20:50"])
def test_a_conversation_goes_on_from_its_end(groups: str) -> None:
    h = Harness(options=f"windows={groups}", page_size=16)
    prompt = prompt_of(0, 100)
    h.send("first", prompt, 150)
    h.run()
    longer = prompt + h.output("first") + prompt_of(1, 30)
    h.send("next", longer, 5)
    h.run()
    assert h.cached("next") == 249
    assert h.output("next") == longer[:5]
    h.assert_at_baseline()


def test_a_hit_ends_where_every_group_can_continue_and_the_lost_part_is_computed_once() -> None:
    h = Harness(options="windows=0:20:50", page_size=4)
    prompt = prompt_of(0, 200)
    h.send("first", prompt, 1)
    h.run()
    cache = h.scheduler.ledger.cache
    # Nothing is left of the last windows in one group, so that a match must end before them.
    freed = cache.evict(2, cache.evictable(2))
    assert freed == 200
    found = []
    for rid in ("again", "third"):
        h.send(rid, [*prompt, 7], 3)
        h.run()
        assert h.output(rid) == prompt[:3]
        found.append(h.cached(rid))
    assert found == [0, 200]
    h.assert_at_baseline()


@pytest.mark.parametrize("radix_cache", [True, False])
def test_a_window_pool_that_runs_short_while_the_full_one_does_not_retracts_and_loses_nothing(radix_cache: bool) -> None:
    options = f"windows=0:60,window_slots={5 * 64}"
    h = Harness(options=options, page_size=4, max_total_tokens=8192, radix_cache=radix_cache, chunked_prefill_size=24)
    h.scheduler.prefill.ratio.INITIAL = h.scheduler.prefill.ratio.value = 0.0  # admits more than the window pool holds
    prompts = {f"r{i}": prompt_of(i, 10 + i) for i in range(12)}
    for rid, prompt in prompts.items():
        h.send(rid, prompt, 120)
    h.run()
    for rid, prompt in prompts.items():
        assert h.output(rid) == echo(prompt, 120)
        assert h.reason(rid) == FinishLength(120)
    assert h.outbox.stats is not None
    assert h.outbox.stats.retractions_total > 0
    h.assert_at_baseline()


def test_requests_that_hold_their_windows_are_expected_to_take_no_more_there() -> None:
    """By the estimate alone, without one retraction, as many run as have room: each is long, and none of it is kept."""
    page = 4
    room = 8
    slots = room * most_window_tokens(WINDOW, 8, page)
    h = Harness(options=f"windows={WINDOW}", page_size=page, max_total_tokens=slots, chunked_prefill_size=8, max_running_requests=32)
    for i in range(2 * room):
        h.send(f"r{i}", prompt_of(i, 8), 400)
    h.run()
    assert h.outbox.stats is not None
    assert h.outbox.stats.max_batch_size >= room
    assert h.outbox.stats.retractions_total == 0
    h.assert_at_baseline()


def test_a_full_pool_that_runs_short_takes_windows_with_what_it_evicts() -> None:
    h = Harness(options="windows=0:20", page_size=4, max_total_tokens=256)
    for i in range(6):
        h.send(f"r{i}", prompt_of(i, 100), 20)
        h.run()
        assert h.output(f"r{i}") == prompt_of(i, 100)[:20]
    cache = h.scheduler.ledger.cache
    assert cache.evictable(1) <= cache.evictable(0) <= 256
    h.assert_at_baseline()


def test_an_aborted_request_gives_back_its_windows() -> None:
    h = Harness(options="windows=0:20:50", page_size=4)
    h.send("a", prompt_of(0, 100), 300)
    h.run_until("a", ReqState.RUNNING)
    for _ in range(100):
        h.turn()
    assert min(obtained(h)) > 0
    h.abort("a")
    h.run()
    h.assert_at_baseline()


@pytest.mark.parametrize("windows", [f"0:{WINDOW}", f"{WINDOW}", f"0:{WINDOW}:5"])
@pytest.mark.parametrize("shared", [3, 30, 47, 62])
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_a_page_is_copied_in_every_group_and_let_go_as_windows_move_on(windows: str, shared: int, chunk: int) -> None:
    h = Harness(page_size=16, chunked_prefill_size=chunk, options=f"windows={windows}")
    stem = prompt_of(0, shared)
    first, second = [*stem, *prompt_of(1, 80)], [*stem, *prompt_of(2, 80)]
    h.send("first", first, 1, stream=False)
    h.run()
    h.send("again", first, 60)  # what of the stem is behind the windows by now may be lost to them
    h.send("second", second, 60)
    h.run()
    assert h.output("again") == echo(first, 60)
    assert h.output("second") == echo(second, 60)
    assert h.cached("again") == shared + 79
    assert h.cached("second") == shared
    h.assert_at_baseline()
