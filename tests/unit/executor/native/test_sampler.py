"""The native sampler against the torch executor's, and against NumPy readings of what each promises."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
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
    params: SamplingParams, vocab: int, prompt: Int32Array = NO_IDS, output: Int32Array = NO_IDS, isa: str = ISAS[0], top_logprobs: int = -1
) -> _native.Sampler:
    """A sampler with row 0 bound."""
    sampler = _native.Sampler(vocab, isa)
    options = to_options(params, vocab, EOS)
    options.top_logprobs = top_logprobs
    sampler.bind(0, options, prompt, output)
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


@settings(max_examples=150, deadline=None)
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
