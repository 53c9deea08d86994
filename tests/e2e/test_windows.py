"""Layers with a window hold a window's KV, and tokens are transformers', whatever was given back or evicted meanwhile."""

from __future__ import annotations

import pytest

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import Ask, Engine
from e2e.test_conditions import WINDOW, WINDOW_MODELS, check, engine, ids
from sterna.mem_cache.window import most_window_tokens
from sterna.scheduler.kv import KVLedger

LONG = 6 * WINDOW


def window_groups(under_test: Engine) -> list[int]:
    return [group for group, _ in under_test.scheduler.ledger.pools.windows]


@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 3), (4, 32), (16, 0)])
@pytest.mark.parametrize("model", WINDOW_MODELS)
def test_a_request_holds_a_window_however_long_it_grows(tiny: TinyModels, model: str, page_size: int, chunk_size: int) -> None:
    under_test = engine(tiny, model, page_size=page_size, chunked_prefill_size=chunk_size)
    ask = Ask(ids(100), LONG)
    check(tiny, model, [ask], under_test.run(ask))
    for group, held in enumerate(under_test.most_held):
        if group in window_groups(under_test):
            assert held <= most_window_tokens(WINDOW, chunk_size or len(ask.prompt), page_size)
        else:
            assert held >= len(ask.prompt) + LONG - 1
    assert window_groups(under_test)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", WINDOW_MODELS)
def test_giving_slots_back_changes_no_token(tiny: TinyModels, model: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask(ids(30 + 17 * i, seed=i), LONG, turn=5 * i) for i in range(4)]
    settings = {"page_size": 4, "chunked_prefill_size": 20, "radix_cache": False, "overlap": overlap}
    frugal = engine(tiny, model, **settings)
    answers = frugal.run(*asks)
    monkeypatch.setattr(KVLedger, "free_behind", lambda *_: None)
    lavish = engine(tiny, model, **settings)
    assert [answer.ids for answer in lavish.run(*asks)] == [answer.ids for answer in answers]
    for group in window_groups(frugal):
        assert frugal.most_held[group] < lavish.most_held[group] / 3
    check(tiny, model, asks, answers)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("model", WINDOW_MODELS)
def test_a_prefix_that_lost_its_windows_is_found_where_they_are_and_made_whole_again(tiny: TinyModels, model: str, page_size: int) -> None:
    under_test = engine(tiny, model, page_size=page_size)
    cache = under_test.scheduler.ledger.cache
    (first,) = under_test.run(Ask(ids(160), 1))
    everything = Ask([*ids(160), *ids(5, seed=1)], 2 * WINDOW)
    lost: set[int] = set()
    for _ in range(3):
        for group in window_groups(under_test):
            # The beginning goes first: half of what there is, and then not enough is left to go on from the end.
            cache.evict(group, cache.evictable(group) - (2 * page_size if lost else WINDOW + 2 * page_size))
        under_test.spoil()
        shorter = Ask([*ids(160)[:90], *ids(5, seed=2)], 2 * WINDOW)
        answers = [*under_test.run(shorter), *under_test.run(everything), *under_test.run(everything)]
        check(tiny, model, [shorter, everything, everything], answers)
        lost.add(answers[0].cached_tokens)
        assert answers[2].cached_tokens == (len(everything.prompt) - 1) // page_size * page_size
    assert min(lost) < 90 // page_size * page_size
    assert first.cached_tokens == 0


@pytest.mark.parametrize("model", WINDOW_MODELS)
def test_an_answer_many_windows_long_is_continued_from_its_end(tiny: TinyModels, model: str) -> None:
    under_test = engine(tiny, model)
    first = Ask(ids(50), LONG)
    (answer,) = under_test.run(first)
    second = Ask([*first.prompt, *answer.ids, *ids(7, seed=1)], LONG)
    (again,) = under_test.run(second)
    assert again.cached_tokens == 50 + LONG - 1
    # In the middle of the answer its window is gone, so that nobody can go on from there.
    third = Ask([*second.prompt[: 50 + LONG // 2], *ids(7, seed=2)], LONG)
    (other,) = under_test.run(third)
    assert other.cached_tokens <= 64
    check(tiny, model, [first, second, third], [answer, again, other])


def test_many_run_at_once_in_memory_for_the_windows_of_a_few_whole_requests(tiny: TinyModels) -> None:
    model = "mistral-window"
    asks = [Ask(ids(40, seed=i), LONG) for i in range(12)]
    memory = 4 * (40 + LONG)
    answers = engine(tiny, model, max_total_tokens=memory, chunked_prefill_size=16).run(*asks)
    assert max(answer.batch_size for answer in answers) >= 8
    check(tiny, model, asks, answers)


def test_windows_of_these_models_are_as_assumed() -> None:
    for model in WINDOW_MODELS:
        assert tiny_models.VARIANTS[model].config["sliding_window"] == WINDOW
