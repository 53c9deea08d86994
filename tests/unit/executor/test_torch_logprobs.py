"""Logprobs of the torch executor against NumPy in float64, and whatever is around a request."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from sterna.executor.torch import logprobs as logprobs_module
from sterna.executor.torch.sampler import Sampler
from sterna.protocol.sampling import SamplingParams
from unit.executor.logprobs_reference import KINDS, assert_near, expected, logits_of
from unit.executor.seam_driver import SeamDriver
from unit.executor.torch_driver import tiny_executor

VOCAB = 203
EOS = (5, 6)
NO_IDS = np.zeros(0, dtype=np.int32)
SILENT = SamplingParams(seed=8)
ASKING = SamplingParams(seed=3, return_logprob=True, top_logprobs_num=5, token_ids_logprob=(7, 0, 7))
EDITED = msgspec.structs.replace(
    ASKING,
    temperature=0.7,
    top_k=5,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    logit_bias={0: 100.0, 1: -100.0},
    min_new_tokens=3,
    top_logprobs_num=40,
    token_ids_logprob=(),
)
GREEDY = msgspec.structs.replace(ASKING, temperature=0.0, top_logprobs_num=0)
"""Those ask for other things."""


def bound(*rows: SamplingParams) -> Sampler:
    sampler = Sampler(VOCAB, EOS, torch.device("cpu"))
    for row, params in enumerate(rows):
        sampler.bind(row, params, np.arange(9, dtype=np.int32), NO_IDS)
    return sampler


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_of_the_models_own_distribution_and_of_those_who_ask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "_ROWS", 2)
    rows = [SILENT, ASKING, EDITED, SILENT, GREEDY, ASKING]
    sampler = bound(*rows)
    for seed in range(3):
        logits = np.stack([logits_of(kind, VOCAB, 10 * seed + row) for row in range(len(rows))])
        order = np.random.default_rng(seed).permutation(len(rows)).astype(np.int32)
        sampled = sampler.sample(torch.from_numpy(logits[order]), order)
        assert sampled.ok.all()
        assert sampled.logprobs is not None
        told = sampled.logprobs.by_place()
        assert {int(order[place]) for place in told} == {1, 2, 4, 5}
        for place, token in enumerate(sampled.ids.tolist()):
            if (params := rows[order[place]]).return_logprob:
                assert_near(told[place], expected(logits[order[place]], params, token))


@pytest.mark.parametrize("count", [0, 1, VOCAB, VOCAB + 1, 2**40])
def test_of_equals_the_lowest_ids_are_the_likeliest_and_there_are_no_more_than_the_vocabulary_has(count: int) -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[::2] = -0.0  # equal to 0.0
    logits[[200, 17, 90]] = 3
    logits[4] = np.finfo(np.float32).min
    params = msgspec.structs.replace(ASKING, top_logprobs_num=count)
    sampled = bound(params).sample(torch.from_numpy(logits[None].copy()), np.zeros(1, dtype=np.int32))
    assert sampled.logprobs is not None
    told = sampled.logprobs.by_place()[0]
    assert_near(told, expected(logits, params, int(sampled.ids[0])))
    assert told.top_ids == [17, 90, 200, *(token for token in range(VOCAB) if token not in (4, 17, 90, 200)), 4][:count]


def test_where_nobody_asks_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(logprobs_module, "_top_ids")
    sampler = bound(SILENT, SILENT)
    assert sampler.sample(torch.zeros(2, VOCAB), np.arange(2, dtype=np.int32)).logprobs is None


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_token_outside_the_vocabulary_is_refused_where_the_row_is_bound(token: int) -> None:
    sampler = bound()
    params = SamplingParams(return_logprob=True, repetition_penalty=1.1, token_ids_logprob=(3, token))
    with pytest.raises(ValueError, match=f"logprob token {token} is not in a vocabulary of {VOCAB}"):
        sampler.bind(0, params, NO_IDS, NO_IDS)
    for row in range(4):
        sampler.bind(row, msgspec.structs.replace(params, token_ids_logprob=(3,)), NO_IDS, NO_IDS)
    assert len(sampler.state.counts.in_prompt) == 4  # room for four: the one that was refused took none


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("at", [50, EOS[0]])
def test_a_row_with_nan_or_infinity_is_reported_though_a_mask_hides_it(poison: float, at: int) -> None:
    """Else its logprobs would be NaN beside a token."""
    params = msgspec.structs.replace(ASKING, min_new_tokens=3)
    logits = np.stack([logits_of("plain", VOCAB, row) for row in range(3)])
    logits[1, at] = poison
    sampled = bound(params, params, params).sample(torch.from_numpy(logits.copy()), np.arange(3, dtype=np.int32))
    assert sampled.ok.tolist() == [True, False, True]
    assert sampled.logprobs is not None
    for row in (0, 2):
        assert_near(sampled.logprobs.by_place()[row], expected(logits[row], params, int(sampled.ids[row])))


# ---- the executor ----

PROMPT: list[int] = np.random.RandomState(7).randint(3, 336, size=50).tolist()
NEW = 12


@pytest.mark.parametrize("params", [ASKING, EDITED, GREEDY], ids=["asking", "edited", "greedy"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_each_token_has_its_own_beside_any_neighbours_and_after_a_resume(params: SamplingParams, overlap: bool, chunk: int) -> None:
    quiet = SeamDriver(tiny_executor())
    alone, resumed = quiet.add(PROMPT, params), SeamDriver(tiny_executor())
    quiet.run(alone, tokens=NEW)
    assert len({each.chosen for each in alone.logprobs if each is not None}) == NEW  # each token's can be told from another's
    driver = SeamDriver(tiny_executor())
    neighbours = [driver.add(PROMPT[i : i + 20], SILENT if i % 2 else GREEDY) for i in range(4)]
    row = driver.add(PROMPT, params)
    driver.run(*neighbours[:2], row, *neighbours[2:], tokens=NEW, chunk=chunk, overlap=overlap)
    assert (driver.steps_on_top > 0) == overlap
    assert [{each is None for each in neighbour.logprobs} for neighbour in neighbours] == [{False}, {True}, {False}, {True}]
    rest = resumed.add(PROMPT, params, alone.output[:5])
    resumed.run(rest, tokens=NEW, chunk=chunk, overlap=overlap)
    for told, exact in ((row.logprobs, alone.logprobs), (rest.logprobs, alone.logprobs[5:])):
        for ours, theirs in zip(told[: len(exact)], exact, strict=True):
            assert theirs is not None
            assert_near(ours, theirs, tolerance=1e-4)
    assert row.output[:NEW] == rest.output[:NEW] == alone.output


def test_a_step_of_which_no_row_asks_tells_nothing_at_all() -> None:
    driver = SeamDriver(tiny_executor())
    driver.run(driver.add(PROMPT, SILENT), driver.add(PROMPT[:9], SILENT), tokens=NEW)
    assert driver.told_nothing == driver.steps > 0
