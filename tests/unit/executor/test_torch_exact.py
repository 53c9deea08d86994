"""In float32 a request's greedy tokens are transformers', and nothing around it changes them (invariant 7)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from sterna.executor.base import NO_PAGES, STATUS_NAN, STATUS_OK, GroupSlots
from sterna.executor.torch import plan
from sterna.executor.torch.model import TorchModel
from sterna.protocol.sampling import SamplingParams
from unit.executor.torch_driver import CONTEXT, Driver, TinyWeights, random_prompt, tiny_executor

PROMPT = random_prompt(np.random.default_rng(7), 60)
NEW = 24
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


@cache
def reference(variant: str, new: int = NEW) -> list[int]:
    """Greedy tokens by transformers."""
    model = tiny_models.torch_model(variant)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None)
    tokens = out[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > 4  # it wanders: a fault would show
    return tokens


FAMILIES = [
    "llama",
    "llama-untied",
    "llama-bias",
    "llama-one-kv-head",
    "llama-gelu",
    "llama-llama3",
    "llama-yarn",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3-window",
    "gemma2",
    "gemma3",
    "mixtral-window",
    "qwen3-moe",
    "qwen3-moe-some",
    "phi3-window",
    "phi3-short",
    "phi3-long",
    "olmo2-bias",
    "granite",
    "smollm3-window",
]


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(variant: str) -> None:
    driver = Driver(tiny_executor(variant))
    assert driver.generate(driver.add(PROMPT), NEW) == reference(variant)


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_are_those_of_transformers(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    forward = TorchModel.forward

    def recorded(model: TorchModel, *args: Any) -> torch.Tensor:
        seen.append(forward(model, *args))
        return seen[-1]

    monkeypatch.setattr(TorchModel, "forward", recorded)
    driver = Driver(tiny_executor(variant))
    driver.generate(driver.add(PROMPT), 2)
    with torch.no_grad():
        expected = tiny_models.torch_model(variant)(torch.tensor([[*PROMPT, reference(variant)[0]]])).logits[0, -2:]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)


WINDOWED = ["mistral-window", "qwen2-window", "qwen3-window", "gemma2", "gemma3", "phi3-window", "mixtral-window", "smollm3-window"]
WINDOW = 16


@pytest.mark.parametrize("chunk", [1, 5, 16, CONTEXT])
@pytest.mark.parametrize("variant", WINDOWED)
def test_what_falls_behind_a_window_is_not_read_again(variant: str, chunk: int) -> None:
    """The driver fills it with NaN and gives it to others."""
    slots = {"max_total_tokens": 400, "max_running_requests": 1, "chunked_prefill_size": 64, "page_size": 1}
    driver = Driver(tiny_executor(variant, **slots))
    row = driver.add(PROMPT)
    neighbour = driver.add(PROMPT[:30], SEEDED)
    expected = reference(variant, 3 * WINDOW)
    while len(row.output) < len(expected):
        driver.step([(each, min(chunk, len(each.tokens) - each.computed)) for each in (neighbour, row)])
    assert row.output == expected
    assert driver.taken_back > 2 * len(PROMPT)
    for group, window in enumerate(driver.executor.info.group_windows):
        assert len(row.slots[group]) == (len(row.tokens) - 1 if window is None else WINDOW - 1)


@pytest.mark.parametrize("variant", WINDOWED)
def test_a_step_gathers_no_more_than_the_window_of_what_came_before(variant: str) -> None:
    driver = Driver(tiny_executor(variant))
    row = driver.add(PROMPT)
    driver.generate(row, 1)
    driver.step([(row, 1)])
    last = driver.executor._last
    assert last is not None
    seen = {window: bucket.shape[2] for window, (bucket,) in zip(driver.executor.info.group_windows, last.plan.buckets, strict=True)}
    assert seen == ({None: len(PROMPT) + 1, WINDOW: WINDOW} if None in driver.executor.info.group_windows else {WINDOW: WINDOW})


@pytest.mark.parametrize("variant", WINDOWED)
def test_a_prefix_of_which_only_the_window_is_left_gives_the_same_tokens(variant: str) -> None:
    driver = Driver(tiny_executor(variant))
    first = driver.add(PROMPT)
    driver.step([(first, 48)])
    second = driver.add(PROMPT)
    for table, held, window in zip(driver.tables, first.slots, driver.executor.info.group_windows, strict=True):
        assert sorted(held) == list(range(0 if window is None else 48 - WINDOW + 1, 48))
        table[second.index, sorted(held)] = table[first.index, sorted(held)]
        table[second.index, : 48 - len(held)] = -1
    second.computed = 48
    assert driver.generate(second, NEW) == reference(variant)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 7, 59])
def test_prefill_in_chunks_gives_the_same_tokens(variant: str, chunk: int) -> None:
    driver = Driver(tiny_executor(variant))
    assert driver.generate(driver.add(PROMPT), NEW, chunk=chunk) == reference(variant)
    assert driver.steps >= len(PROMPT) // chunk + NEW - 1


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-window"])
def test_a_chunk_of_several_spans_gives_the_same_tokens(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_SPAN", 8)
    driver = Driver(tiny_executor(variant))
    assert driver.generate(driver.add(PROMPT), NEW) == reference(variant)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-moe"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SEEDED], ids=["greedy", "seeded"])
def test_fifteen_neighbours_change_nothing(variant: str, params: SamplingParams) -> None:
    alone = Driver(tiny_executor(variant))
    expected = alone.generate(alone.add(PROMPT, params), NEW)

    driver = Driver(tiny_executor(variant), seed=3)
    rng = np.random.default_rng(5)
    row = driver.add(PROMPT, params)
    others = [driver.add(random_prompt(rng, int(rng.integers(1, 120))), SamplingParams(temperature=1.0, seed=i)) for i in range(15)]
    mixed = 0
    while len(row.output) < NEW:
        chunks = [(r, int(min(rng.integers(1, 24), len(r.tokens) - r.computed))) for r in [*others[:8], row, *others[8:]]]
        lengths = {count for _, count in chunks}
        mixed += 1 in lengths and len(lengths) > 2
        driver.step(chunks)
    assert mixed > 2  # steps with decodes and chunks of several sizes
    assert row.output == expected


def test_a_cached_prefix_gives_the_same_tokens_at_and_around_a_page_boundary() -> None:
    for shared in (15, 16, 17):
        driver = Driver(tiny_executor("llama"))
        first = driver.add(PROMPT)
        driver.generate(first, 1)
        second = driver.add(PROMPT)
        driver.tables[0][second.index, :shared] = driver.tables[0][first.index, :shared]
        second.computed = shared
        assert driver.generate(second, NEW) == reference("llama")


@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_a_step_may_copy_pages_before_it_writes(variant: str) -> None:
    executor = tiny_executor(variant)
    page, layers = executor.info.page_size, executor.pool.layers
    first = np.array([3 * page], dtype=np.int32), np.array([7 * page], dtype=np.int32)
    with torch.inference_mode():
        for layer in layers:
            layer.copy_(torch.arange(layer.numel(), dtype=layer.dtype).reshape(layer.shape))
        expected = [layer.clone() for layer in layers]
        executor.pool.copy_pages(tuple(GroupSlots(NO_PAGES, NO_PAGES[None], *first) for _ in executor.info.group_slots))
        for layer, before in zip(layers, expected, strict=True):
            before[7 * page : 8 * page] = before[3 * page : 4 * page]
            assert torch.equal(layer, before)


def test_generated_tokens_replayed_as_one_chunk_continue_as_before() -> None:
    tokens = reference("llama")
    driver = Driver(tiny_executor("llama"))
    row = driver.add(PROMPT, output=tokens[:10])
    assert driver.generate(row, NEW) == tokens


@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_nan_in_pages_that_nobody_owns_is_harmless(variant: str) -> None:
    executor = tiny_executor(variant)
    driver = Driver(executor)
    with torch.inference_mode():
        for layer in executor.pool.layers:
            layer.fill_(torch.nan)
    long, short = driver.add(PROMPT), driver.add(PROMPT[:1])
    while len(long.output) < NEW:
        driver.step([(row, min(16, len(row.tokens) - row.computed)) for row in (short, long)])
    assert long.output == reference(variant)
    assert set(long.statuses + short.statuses) == {STATUS_OK}


def test_a_freed_page_that_held_nan_can_be_used_again() -> None:
    executor = tiny_executor("llama", max_total_tokens=112)
    driver = Driver(executor)
    first = driver.add(PROMPT)
    driver.generate(first, 4)
    driver.remove(first)
    driver.fill(0, driver.free[0], torch.nan)
    assert driver.generate(driver.add(PROMPT), NEW) == reference("llama")


def test_a_token_taken_unread_from_the_last_step_is_the_token_that_it_sampled() -> None:
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, 9), PROMPT, random_prompt(rng, 3)]
    params = [SEEDED, SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)]

    fed = Driver(tiny_executor("llama"))
    expected = [fed.generate(fed.add(prompt, p), 12) for prompt, p in zip(prompts, params, strict=True)]

    driver = Driver(tiny_executor("llama"))
    rows = [driver.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    order = list(rows)
    handle = driver.submit([(row, len(row.prompt)) for row in order])
    for _ in range(11):
        # Rows change places, so that a row isn't just its own predecessor in the batch.
        following = order[1:] + order[:1]
        ahead = driver.submit([(row, 1) for row in following], from_last={at: order.index(row) for at, row in enumerate(following)})
        driver.read(handle, order)
        handle, order = ahead, following
    driver.read(handle, order)
    assert [row.output for row in rows] == expected


def test_taking_a_token_that_no_step_sampled_fails_that_step_and_no_later_one() -> None:
    driver = Driver(tiny_executor("llama"))
    row = driver.add(PROMPT)
    handle = driver.submit([(row, 1)], from_last={0: 0})
    with pytest.raises(ValueError, match="sampled none"):
        handle.result()
    other = driver.add(PROMPT)
    assert driver.generate(other, NEW) == reference("llama")


def test_nan_logits_are_their_own_rows_fault_only() -> None:
    weights = TinyWeights("llama")
    embed = weights.stored["model.embed_tokens.weight"].copy()
    poison = next(token for token in range(3, 336) if token not in {*PROMPT, *reference("llama")})
    weights.stored = {**weights.stored, "model.embed_tokens.weight": embed}
    # The head stays sound: only an input of this token is poisoned.
    weights.stored["lm_head.weight"] = embed.copy()
    embed[poison] = np.nan
    executor = tiny_executor("llama", weights=weights, untied=True)
    driver = Driver(executor)
    good, bad = driver.add(PROMPT), driver.add([*PROMPT[:5], poison, *PROMPT[5:9]], SEEDED)
    driver.step([(bad, len(bad.prompt)), (good, len(good.prompt))])
    assert (bad.output, bad.statuses, good.statuses) == ([], [STATUS_NAN], [STATUS_OK])
    driver.remove(bad)
    assert driver.generate(good, NEW) == reference("llama")


def test_rows_that_want_nothing_get_nothing() -> None:
    driver = Driver(tiny_executor("llama"))
    waiting, done = driver.add(PROMPT), driver.add(PROMPT[:5])
    driver.step([(waiting, 20), (done, 5)])
    assert (waiting.output, len(done.output)) == ([], 1)
    driver.step([(waiting, 20)])
    assert waiting.output == []


def test_a_sample_for_an_unbound_row_fails_the_step() -> None:
    driver = Driver(tiny_executor("llama"))
    row = driver.add(PROMPT[:3])
    driver.executor.release(row.index)
    driver.executor.release(row.index)
    with pytest.raises(ValueError, match="isn't bound"):
        driver.step([(row, 3)])


@pytest.mark.parametrize("variant", ["llama", "qwen3-window", "gemma2", "qwen3-moe"])
def test_bfloat16_batches_of_decodes_and_chunks_stay_close_to_float32(variant: str) -> None:
    wide, narrow = Driver(tiny_executor(variant, dtype="bfloat16")), Driver(tiny_executor(variant))
    # Teacher-forced, so that one near tie doesn't send the two ways apart.
    text = PROMPT + reference(variant)
    agreeing = 0
    for driver in (wide, narrow):
        rows = [driver.add(text[: 20 + 4 * i]) for i in range(6)]
        driver.step([(row, len(row.prompt)) for row in rows])
        driver.step([(row, 1) for row in rows])
        assert {status for row in rows for status in row.statuses} == {STATUS_OK}
    for ours, exact in zip(wide.rows, narrow.rows, strict=True):
        agreeing += sum(a == b for a, b in zip(ours.output, exact.output, strict=True))
    assert agreeing >= 9  # of 12


def test_a_prompt_as_long_as_the_context_runs() -> None:
    driver = Driver(tiny_executor("llama"))
    row = driver.add(random_prompt(np.random.default_rng(0), CONTEXT))
    assert len(driver.generate(row, 1)) == 1
