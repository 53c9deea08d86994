"""The sampler against a slow reading of its own documentation, one row and one candidate at a time."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sterna.executor.philox import sampling_noise
from sterna.executor.torch import sampler as sampler_module
from sterna.executor.torch.sampler import Sampler
from sterna.protocol.sampling import SamplingParams

VOCAB = 203  # no multiple of 4
EOS = (5, 6)
Float64Array = NDArray[np.float64]
NO_IDS = np.zeros(0, dtype=np.int32)


def make_sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, EOS, torch.device("cpu"))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 4).astype(np.float32)


def sample(sampler: Sampler, logits: NDArray[np.float32], rows: list[int]) -> list[int]:
    return sampler.sample(torch.from_numpy(logits.copy()), np.array(rows, dtype=np.int32)).ids.tolist()


def candidates(logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]) -> tuple[Float64Array, list[int]]:
    """z over the vocabulary, and the ids that the filters keep."""
    z = logits.astype(np.float64)
    for token in range(len(z)):
        if token in prompt or token in output:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        count = output.count(token)
        z[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        z[token] += params.logit_bias.get(token, 0.0)
    if len(output) < params.min_new_tokens:
        z[[*params.stop_token_ids, *(() if params.ignore_eos else EOS)]] = -math.inf
    if params.temperature == 0:
        return z, [int(z.argmax())]
    z = (z - z.max()) / params.temperature
    order = sorted(range(len(z)), key=lambda token: -z[token])
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = sum(math.exp(z[token]) for token in kept)
    likelier, nucleus = 0.0, []
    for token in kept:
        if likelier < params.top_p * mass:
            nucleus.append(token)
        likelier += math.exp(z[token])
    return z, [token for token in nucleus if math.exp(z[token]) >= params.min_p]


def expected_token(logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]) -> int:
    z, kept = candidates(logits, params, prompt, output)
    return max(sorted(kept), key=lambda token: z[token] + float(sampling_noise(params.seed, len(output), [token])[0]))


CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(seed=1),
    "cold": SamplingParams(temperature=0.3, seed=2),
    "hot": SamplingParams(temperature=50.0, seed=3),
    "top_k": SamplingParams(top_k=7, temperature=2.0, seed=2**64 - 1),
    "top_k of one": SamplingParams(top_k=1, seed=9),
    "top_k beyond the vocabulary": SamplingParams(top_k=10**9, seed=9),
    "top_p": SamplingParams(top_p=0.7, temperature=3.0, seed=4),
    "tiny top_p": SamplingParams(top_p=1e-6, seed=4),
    "min_p": SamplingParams(min_p=0.2, temperature=3.0, seed=5),
    "all filters": SamplingParams(top_k=40, top_p=0.8, min_p=0.05, temperature=4.0, seed=6),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "repetition below one": SamplingParams(temperature=0.0, repetition_penalty=0.5),
    "presence and frequency": SamplingParams(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5, seed=7),
    "negative penalties": SamplingParams(temperature=0.7, presence_penalty=-1.5, frequency_penalty=-0.5, seed=7),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 8.0, 3: -100.0, 202: 9.0}, seed=8),
    "min_new_tokens": SamplingParams(temperature=0.0, min_new_tokens=6, stop_token_ids=(9,), logit_bias={5: 50.0, 9: 60.0}),
    "min_new_tokens, ignore_eos": SamplingParams(
        temperature=0.0, min_new_tokens=6, ignore_eos=True, stop_token_ids=(9,), logit_bias={5: 50.0, 9: 60.0}
    ),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={1: 3.0},
        min_new_tokens=4,
        stop_token_ids=(9,),
        seed=10,
    ),
}


def run_alone(params: SamplingParams, prompt: list[int], steps: int = 12) -> list[int]:
    sampler = make_sampler()
    sampler.bind(3, params, np.array(prompt, dtype=np.int32), NO_IDS)
    return [sample(sampler, random_logits(1, seed), [3])[0] for seed in range(steps)]


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_what_the_documentation_says(name: str) -> None:
    params, prompt, output = CASES[name], [1, 2, 3, 100], []
    for seed, token in enumerate(run_alone(params, prompt)):
        assert token == expected_token(random_logits(1, seed)[0], params, prompt, output), f"output token {seed}"
        output.append(token)


def test_all_kinds_of_rows_in_one_batch_get_what_each_gets_alone() -> None:
    sampler = make_sampler()
    rows = list(range(len(CASES)))
    for row, params in zip(rows, CASES.values(), strict=True):
        sampler.bind(row, params, np.array([1, 2, 3, 100], dtype=np.int32), NO_IDS)
    rng = np.random.default_rng(0)
    outputs: list[list[int]] = [[] for _ in rows]
    for seed in range(12):
        order = rng.permutation(rows).tolist()
        for row, token in zip(order, sample(sampler, np.repeat(random_logits(1, seed), len(rows), axis=0), order), strict=True):
            outputs[row].append(token)
    assert outputs == [run_alone(params, [1, 2, 3, 100]) for params in CASES.values()]


@pytest.mark.parametrize("name", ["plain", "everything", "presence and frequency", "min_new_tokens"])
def test_a_row_bound_with_its_output_so_far_goes_on_with_the_same_tokens(name: str) -> None:
    tokens = run_alone(CASES[name], [1, 2, 3])
    sampler = make_sampler()
    sampler.bind(0, CASES[name], np.array([1, 2, 3], dtype=np.int32), np.array(tokens[:5], dtype=np.int32))
    assert [sample(sampler, random_logits(1, seed), [0])[0] for seed in range(5, 12)] == tokens[5:]


def test_a_flat_nucleus_wider_than_the_first_look_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_TOP", 8)
    params = SamplingParams(top_p=0.9, temperature=30.0, seed=12)
    tokens = run_alone(params, [])
    assert tokens == [expected_token(random_logits(1, seed)[0], params, [], list(range(seed))) for seed in range(12)]
    widths = [len(candidates(random_logits(1, seed)[0], params, [], [])[1]) for seed in range(12)]
    assert min(widths) > 8


def test_many_blocks_of_noise_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_alone(CASES["hot"], [])
    monkeypatch.setattr(sampler_module, "_BLOCKS", 7)
    assert run_alone(CASES["hot"], []) == whole


def test_equal_logits_give_the_lowest_id_when_greedy() -> None:
    sampler = make_sampler()
    sampler.bind(0, CASES["greedy"], NO_IDS, NO_IDS)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [17, 90, 200]] = 3.0
    assert sample(sampler, logits, [0]) == [17]


def test_top_k_keeps_equal_logits_together() -> None:
    sampler = make_sampler()
    sampler.bind(0, SamplingParams(top_k=2, seed=0), NO_IDS, NO_IDS)
    logits = np.full((1, VOCAB), -1.0, dtype=np.float32)
    logits[0, [10, 20, 30]] = 3.0
    assert {sample(sampler, logits, [0])[0] for _ in range(60)} == {10, 20, 30}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.6), SamplingParams(temperature=2.0)])
def test_draws_follow_the_softmax_of_what_is_left(params: SamplingParams) -> None:
    logits = (np.random.default_rng(1).standard_normal((1, 12)) * 1.5).astype(np.float32)
    sampler = make_sampler(12)
    rows, steps = 250, 16
    for row in range(rows):
        sampler.bind(row, msgspec.structs.replace(params, seed=row), NO_IDS, NO_IDS)
    batch = np.repeat(logits, rows, axis=0)
    observed = np.bincount([token for _ in range(steps) for token in sample(sampler, batch, list(range(rows)))], minlength=12)
    draws = rows * steps
    z = np.sort((logits[0].astype(np.float64) - logits.max()) / params.temperature)[::-1]
    order = np.argsort(-logits[0])
    mass = np.exp(z) / np.exp(z).sum()
    kept = np.cumsum(mass) - mass < params.top_p
    expected = draws * mass[kept] / mass[kept].sum()
    assert observed[order[~kept]].sum() == 0
    chi_square = ((observed[order[kept]] - expected) ** 2 / expected).sum()
    degrees = kept.sum() - 1
    # Wilson and Hilferty's approximation of the 99.9% quantile; the draws are fixed by the seeds.
    assert chi_square < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


def test_an_end_token_that_the_model_has_no_row_for_is_passed_over() -> None:
    sampler = Sampler(VOCAB, (VOCAB + 4, 5), torch.device("cpu"))
    sampler.bind(0, SamplingParams(temperature=0.0, min_new_tokens=1), NO_IDS, NO_IDS)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 5], logits[0, 8] = 2.0, 1.0
    assert [sample(sampler, logits, [0])[0] for _ in range(2)] == [8, 5]


def test_two_seeds_differ_and_one_repeats() -> None:
    first, again, other = (run_alone(SamplingParams(temperature=5.0, seed=seed), []) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [CASES["greedy"], CASES["everything"]], ids=["greedy", "everything"])
def test_a_row_without_a_finite_maximum_is_reported_and_harms_nobody(poison: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    clean = make_sampler()
    for row in range(3):
        clean.bind(row, params, NO_IDS, NO_IDS)
    expected = sample(clean, logits, [0, 1, 2])
    logits[1, 50] = poison
    sampler = make_sampler()
    for row in range(3):
        sampler.bind(row, params, NO_IDS, NO_IDS)
    sampled = sampler.sample(torch.from_numpy(logits), np.arange(3, dtype=np.int32))
    assert sampled.ok.tolist() == [True, False, True]
    assert [sampled.ids.tolist()[i] for i in (0, 2)] == [expected[0], expected[2]]
    assert 0 <= sampled.ids.tolist()[1] < VOCAB


def test_binding_twice_is_refused_and_release_makes_room() -> None:
    sampler = make_sampler()
    sampler.bind(0, CASES["everything"], NO_IDS, NO_IDS)
    with pytest.raises(ValueError, match="row 0 is bound"):
        sampler.bind(0, CASES["greedy"], NO_IDS, NO_IDS)
    sampler.release(0)
    sampler.release(0)
    sampler.bind(0, CASES["greedy"], NO_IDS, NO_IDS)


def test_a_released_rows_penalties_do_not_pass_to_its_successor() -> None:
    sampler = make_sampler()
    for _ in range(3):
        sampler.bind(0, CASES["repetition"], np.arange(50, dtype=np.int32), np.arange(50, dtype=np.int32))
        sampler.release(0)
    sampler.bind(0, CASES["repetition"], NO_IDS, NO_IDS)
    logits = random_logits(1)
    assert sample(sampler, logits, [0]) == [int(logits.argmax())]


def test_penalty_memory_follows_the_rows_bound_at_once_not_those_ever_bound() -> None:
    sampler = make_sampler()
    for row in range(200):
        sampler.bind(row, CASES["repetition"], NO_IDS, NO_IDS)
        if row >= 3:
            sampler.release(row - 3)
    assert len(sampler.state.counts.in_prompt) == 4
    for row in range(1000, 1100):
        sampler.bind(row, CASES["plain"], NO_IDS, NO_IDS)
    assert len(sampler.state.counts.in_prompt) == 4
