"""The native sampler against the torch executor's, and against NumPy readings of what each promises."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.sampling import to_options
from sterna.executor.philox import sampling_noise
from sterna.executor.torch.sampler import Sampler as TorchSampler
from sterna.protocol.sampling import SamplingParams
from unit.executor.native.lanes_reference import ISAS

EOS = (5, 6)
NO_IDS = np.zeros(0, dtype=np.int32)
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


def bound(
    params: SamplingParams, vocab: int, prompt: Int32Array = NO_IDS, output: Int32Array = NO_IDS, isa: str = ISAS[0]
) -> _native.Sampler:
    """A sampler with row 0 bound."""
    sampler = _native.Sampler(vocab, isa)
    sampler.bind(0, to_options(params, vocab, EOS), prompt, output)
    return sampler


def logits_of(kind: str, vocab: int, seed: int) -> Float32Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(vocab) * 3
    match kind:
        case "ties":
            x = np.round(x)
        case "flat":
            x[:] = 1.5
        case "peaked":
            x[rng.integers(vocab)] += 30
        case "huge":
            x *= 1e37
        case "small":
            x *= 1e-20
        case "holes":
            x[rng.random(vocab) < 0.5] = -np.inf
            x[rng.integers(vocab)] = 0
    return x.astype(np.float32)


KINDS = ["plain", "ties", "flat", "peaked", "huge", "small", "holes"]


@st.composite
def sampling_params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    tokens = st.integers(0, vocab - 1)
    penalty = st.sampled_from([0.0, 0.0, 0.5, -0.7, 2.0])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.0, 3.0, 100.0])),
        top_k=draw(st.sampled_from([-1, -1, 1, 2, 7, 40, 10**9])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.95, 0.9999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2, 0.6])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 4.0, 100.0]), max_size=4)),
        min_new_tokens=draw(st.integers(0, 4)) if vocab > 16 else 0,
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))) if vocab > 16 else (),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def nucleus_is_decided(logits: Float32Array, params: SamplingParams, prompt: Int32Array, output: list[int]) -> bool:
    """Whether no token's place in the nucleus hangs on the rounding of float32 sums, which the torch executor takes."""
    if params.top_p == 1 or params.temperature == 0:
        return True
    options = msgspec.structs.replace(params, top_p=1.0, top_k=-1, min_p=0.0, temperature=0.0)
    edited = torch.from_numpy(logits.copy())[None]
    sampler = TorchSampler(len(logits), EOS, torch.device("cpu"))
    sampler.bind(0, options, prompt, np.array(output, dtype=np.int32))
    sampler.sample(edited, np.zeros(1, dtype=np.int32))  # leaves its edits there
    z = np.sort((edited[0].double().numpy() - float(edited.max())) / params.temperature)[::-1]
    if params.top_k > 0:
        z = z[z >= z[min(params.top_k, len(z)) - 1]]
    reached = np.cumsum(np.exp(z))
    return bool((np.abs(reached / reached[-1] - params.top_p) > 1e-5).all())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tokens_are_the_torch_executors_for_any_parameters(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 3, 5, 31, 32, 33, 203, 2050]))
    params = data.draw(sampling_params(vocab))
    kind, seed = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 2**32))
    prompt = np.array(data.draw(st.lists(st.integers(0, vocab - 1), max_size=6)), dtype=np.int32)
    reference = TorchSampler(vocab, EOS, torch.device("cpu"))
    reference.bind(0, params, prompt, NO_IDS)
    samplers = [bound(params, vocab, prompt, isa=isa) for isa in ISAS]
    output: list[int] = []
    for step in range(6):
        logits = logits_of(kind, vocab, seed + step)
        sampled = reference.sample(torch.from_numpy(logits.copy())[None], np.zeros(1, dtype=np.int32))
        mine = [sampler.sample(0, logits.copy()) for sampler in samplers]
        if not sampled.ok[0]:
            assert all(each.nan for each in mine)
            return
        assert len({each.token for each in mine}) == 1
        if not nucleus_is_decided(logits, params, prompt, output):
            return
        output.append(sampled.ids.tolist()[0])
        assert [(each.token, each.nan) for each in mine] == [(output[-1], False)] * len(ISAS), f"output token {step}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [2, 33, 20_000])
@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, -1e-40, 1.2e-38, -1.2e-38, 1.0])
def test_a_nucleus_of_one_is_the_likeliest_token_even_where_its_logit_is_zero(largest: float, vocab: int, isa: str) -> None:
    logits = np.full(vocab, -1.0, dtype=np.float32)
    logits[vocab // 2] = largest
    sampler = bound(SamplingParams(temperature=100.0, top_p=1e-6, seed=0), vocab, NO_IDS, isa=isa)
    assert [sampler.sample(0, logits.copy()).token for _ in range(12)] == [vocab // 2] * 12


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "holes"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
def test_the_drawn_token_is_the_largest_of_all_noisy_candidates(isa: str, kind: str, temperature: float) -> None:
    vocab = 49_151
    logits = logits_of(kind, vocab, 1)
    z = (logits - logits.max()) / np.float32(temperature)
    seed, tokens = 2**63 + 7, np.arange(vocab)
    for index in (0, 1, 70_000):
        sampler = bound(SamplingParams(temperature=temperature, seed=seed), vocab, NO_IDS, np.zeros(index, dtype=np.int32), isa)
        assert sampler.sample(0, logits.copy()).token == int(np.argmax(z + sampling_noise(seed, index, tokens)))


@pytest.mark.parametrize("isa", ISAS)
def test_equally_noisy_candidates_give_the_lowest_id(isa: str) -> None:
    seed, index, vocab = 11, 1323, 49_152
    noise = sampling_noise(seed, index, np.arange(vocab))
    tied = np.flatnonzero(noise == noise.max()).tolist()
    assert len(tied) == 2
    flat, one_likelier = np.zeros(vocab, dtype=np.float32), np.full(vocab, -1, dtype=np.float32)
    one_likelier[tied] = -1e-9, 0  # too little to change a score
    for logits in (flat, one_likelier):
        sampler = bound(SamplingParams(seed=seed), vocab, NO_IDS, np.zeros(index, dtype=np.int32), isa)
        assert sampler.sample(0, logits).token == tied[0]


def kept_by_sorting(z: Float32Array, params: SamplingParams) -> tuple[float, float]:
    """The smallest z that is kept, and how near (relative to the mass) the nearest to the nucleus' edge is to falling on its other side."""
    levels, counts = np.unique(z, return_counts=True)
    levels, counts = levels[::-1].astype(np.float64), counts[::-1]
    if params.top_k > 0:
        kept = np.cumsum(counts) - counts < params.top_k
        levels, counts = levels[kept], counts[kept]
    weights = np.exp(levels) * counts
    likelier = np.cumsum(weights) - weights
    wanted = float(np.float32(params.top_p)) * weights.sum()
    kept = likelier < wanted if params.top_p < 1 else np.ones(len(levels), dtype=bool)
    kept &= np.exp(levels) >= params.min_p
    return levels[kept][-1], float(np.abs(likelier / wanted - 1).min())


FILTERS = [
    SamplingParams(top_p=0.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.97, min_p=0.001),
    SamplingParams(top_k=50),
    SamplingParams(top_k=50, top_p=0.8),
    SamplingParams(top_k=3_000, top_p=0.9),
    SamplingParams(top_k=5_999),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "peaked", "holes"])
def test_the_filters_keep_what_sorting_would(isa: str, kind: str) -> None:
    vocab, widths = 6_001, []
    for seed, temperature in enumerate((0.3, 1.0, 1.7, 6.0, 80.0)):
        logits = logits_of(kind, vocab, seed)
        z = (logits - logits.max()) / np.float32(temperature)
        for each in FILTERS:
            params = msgspec.structs.replace(each, temperature=temperature)
            smallest, margin = kept_by_sorting(z, params)
            assert margin > 1e-6 or params.top_p == 1  # else the order of sums decides, and the case says nothing
            floor = _native.kernels.filter_floor(isa, to_options(params, vocab, ()), logits)
            # Below about -20 nothing can win: neither counts.
            assert np.array_equal((z >= floor) & (z > -20), (z >= smallest) & (z > -20)), params
            widths.append(int((z >= smallest).sum()))
    assert min(widths) < 60 or kind == "flat"
    assert max(widths) > 1_500


@pytest.mark.parametrize("isa", ISAS)
def test_logits_that_round_to_the_same_distance_from_the_largest_are_kept_together(isa: str) -> None:
    logits = (np.random.default_rng(0).standard_normal(5_000) * 1e-20).astype(np.float32)
    logits[17] = 4
    for params in (SamplingParams(top_k=2, temperature=2.0), SamplingParams(top_p=0.9), SamplingParams(top_k=9, top_p=0.9)):
        tokens = {bound(msgspec.structs.replace(params, seed=seed), 5_000, isa=isa).sample(0, logits.copy()).token for seed in range(40)}
        assert len(tokens) > 20


@pytest.mark.parametrize("isa", ISAS)
def test_the_same_bits_on_every_instruction_set(isa: str) -> None:
    params = SamplingParams(
        temperature=1.4, top_p=0.95, repetition_penalty=1.1, seed=3, return_logprob=True, top_logprobs_num=4, token_ids_logprob=(0, 19_999)
    )
    for seed in range(20):
        logits = logits_of("plain", 20_000, seed)
        mine, reference = (bound(params, 20_000, np.arange(50, dtype=np.int32), isa=each) for each in (isa, "portable"))
        one, other = mine.sample(0, logits.copy()), reference.sample(0, logits.copy())
        assert (one.token, one.logprobs) == (other.token, other.logprobs)
        assert one.logprobs is not None


EVERYTHING = SamplingParams(
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
)


def run(sampler: _native.Sampler, steps: range, vocab: int = 203) -> list[int]:
    return [sampler.sample(0, logits_of("plain", vocab, seed)).token for seed in steps]


def test_a_row_bound_with_its_output_so_far_goes_on_with_the_same_tokens() -> None:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    tokens = run(bound(EVERYTHING, 203, prompt), range(12))
    for so_far in range(12):
        sampler = bound(EVERYTHING, 203, prompt, np.array(tokens[:so_far], dtype=np.int32))
        assert run(sampler, range(so_far, 12)) == tokens[so_far:]


def test_rows_do_not_touch_each_other() -> None:
    alone = run(bound(EVERYTHING, 203), range(8))
    sampler = bound(EVERYTHING, 203)
    other = to_options(msgspec.structs.replace(EVERYTHING, seed=77, repetition_penalty=2.0), 203, EOS)
    together = []
    for seed in range(8):
        sampler.bind(5, other, np.array([4], dtype=np.int32), NO_IDS)
        sampler.set_mask(5, np.full(7, 0xF0F0F0F0, dtype=np.uint32))
        sampler.sample(5, logits_of("ties", 203, seed))
        together += run(sampler, range(seed, seed + 1))
        sampler.release(5)
    assert together == alone


def test_end_tokens_are_held_back_until_min_new_tokens() -> None:
    logits = np.zeros(20, dtype=np.float32)
    logits[[9, 5]] = 50, 40
    params = SamplingParams(temperature=0.0, min_new_tokens=2, stop_token_ids=(9,))

    def tokens(params: SamplingParams) -> list[int]:
        sampler = bound(params, 20)
        return [sampler.sample(0, logits.copy()).token for _ in range(3)]

    assert tokens(params) == [0, 0, 9]
    assert tokens(msgspec.structs.replace(params, ignore_eos=True)) == [5, 5, 9]
    assert tokens(msgspec.structs.replace(params, min_new_tokens=0)) == [9, 9, 9]


def test_an_end_token_that_the_model_has_no_row_for_is_passed_over() -> None:
    assert to_options(SamplingParams(min_new_tokens=1), 20, (5, 24)).end_ids == [5]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_mask_is_logits_of_minus_infinity(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 203]))
    params = data.draw(sampling_params(vocab))
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    masked, plain = bound(params, vocab), bound(params, vocab)
    for step in range(4):
        logits, allowed = logits_of("plain", vocab, seed + step), rng.random(vocab) < rng.random()
        masked.set_mask(0, np.packbits(np.resize(allowed, -(-vocab // 32) * 32), bitorder="little").view(np.uint32))
        one, other = masked.sample(0, logits.copy()), plain.sample(0, np.where(allowed, logits, -np.inf).astype(np.float32))
        assert (one.token, one.nan) == (other.token, other.nan)
        assert one.nan or allowed[one.token]


def test_a_mask_stays_until_it_is_changed_and_goes_with_its_row() -> None:
    logits = np.arange(40, dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    sampler = bound(greedy, 40)
    sampler.set_mask(0, np.array([1 << 7, 0], dtype=np.uint32))
    assert [sampler.sample(0, logits.copy()).token for _ in range(2)] == [7, 7]
    sampler.set_mask(0, np.array([1 << 7, 1 << 3], dtype=np.uint32))
    assert sampler.sample(0, logits.copy()).token == 35
    sampler.set_mask(0, None)
    assert sampler.sample(0, logits.copy()).token == 39
    sampler.set_mask(0, np.array([1, 0], dtype=np.uint32))
    sampler.release(0)
    sampler.bind(0, to_options(greedy, 40, EOS), NO_IDS, NO_IDS)
    assert sampler.sample(0, logits.copy()).token == 39


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), EVERYTHING], ids=["greedy", "plain", "everything"])
def test_a_row_with_nan_or_infinity_has_no_token_and_stays_as_it_was(poison: float, params: SamplingParams) -> None:
    expected = run(bound(params, 203), range(6))
    sampler = bound(params, 203)
    tokens = run(sampler, range(3))
    for at in (0, 9, 202):  # 9 is held back by `everything`, and still seen
        logits = logits_of("plain", 203, 3)
        logits[at] = poison
        sampled = sampler.sample(0, logits)
        assert (sampled.nan, sampled.token) == (True, -1)
    assert tokens + run(sampler, range(3, 6)) == expected


def test_a_row_of_which_no_token_is_left_is_reported() -> None:
    sampler = bound(SamplingParams(), 40)
    assert sampler.sample(0, np.full(40, -np.inf, dtype=np.float32)).nan
    sampler.set_mask(0, np.zeros(2, dtype=np.uint32))
    assert sampler.sample(0, np.zeros(40, dtype=np.float32)).nan
    sampler.set_mask(0, None)
    assert not sampler.sample(0, np.zeros(40, dtype=np.float32)).nan


def test_equal_logits_give_the_lowest_id_when_greedy() -> None:
    logits = np.zeros(203, dtype=np.float32)
    logits[[17, 90, 200]] = 3
    assert [bound(SamplingParams(temperature=0.0), 203, isa=isa).sample(0, logits.copy()).token for isa in ISAS] == [17] * len(ISAS)


def test_what_does_not_fit_is_refused_and_leaves_rows_as_they_were() -> None:
    options = to_options(SamplingParams(repetition_penalty=1.1), 40, EOS)
    sampler = bound(SamplingParams(), 40)
    with pytest.raises(ValueError, match="row 0 is bound"):
        sampler.bind(0, options, NO_IDS, NO_IDS)
    for prompt, output, message in (([40], [], "prompt token 40"), ([], [-1], "output token -1")):
        with pytest.raises(ValueError, match=message):
            sampler.bind(1, options, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
    for name, message in (("bias_ids", "differ in number"), ("end_ids", "end token 40")):
        wrong = to_options(SamplingParams(), 40, EOS)
        setattr(wrong, name, [40])
        with pytest.raises(ValueError, match=message):
            sampler.bind(1, wrong, NO_IDS, NO_IDS)
    with pytest.raises(ValueError, match="bias token 99"):
        sampler.bind(1, to_options(SamplingParams(logit_bias={99: 1.0}), 40, EOS), NO_IDS, NO_IDS)
    with pytest.raises(ValueError, match="row -1"):
        sampler.bind(-1, options, NO_IDS, NO_IDS)
    assert [sampler.is_bound(row) for row in (-1, 0, 1, 1000)] == [False, True, False, False]
    with pytest.raises(ValueError, match="row 1 isn't bound"):
        sampler.set_mask(1, None)
    with pytest.raises(ValueError, match="a mask of 1 words for 40 tokens"):
        sampler.set_mask(0, np.zeros(1, dtype=np.uint32))
    sampler.release(0)
    sampler.release(0)
    assert not sampler.is_bound(0)
