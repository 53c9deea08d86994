"""Logprobs of whole executors over model files, teacher-forced: what transformers says of the text that each has written, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import EXACT, THREADS
from sterna.config.server_args import ServerArgs
from sterna.executor.registry import create_executor
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from unit.executor.seam_driver import Row, SeamDriver

VARIANTS = ["llama", "llama-untied", "qwen2", "qwen3", "gemma2", "mixtral", "phi3", "granite", "olmo2", "smollm3"]
TOKENS = 24
VOCAB = 336
EVERYTHING = SamplingParams(return_logprob=True, top_logprobs_num=20, token_ids_logprob=tuple(range(VOCAB)), ignore_eos=True)
STYLES = [
    msgspec.structs.replace(EVERYTHING, temperature=0.0),
    msgspec.structs.replace(EVERYTHING, temperature=1.5, seed=3),
    msgspec.structs.replace(
        EVERYTHING, temperature=0.8, top_p=0.5, repetition_penalty=1.4, logit_bias={9: 5.0}, seed=4, top_logprobs_num=0
    ),
]
PROMPTS: list[list[int]] = [np.random.RandomState(seed).randint(3, VOCAB, size=length).tolist() for seed, length in enumerate((40, 7, 90))]

TOLERANCE = 2e-4
"""Of the torch executor in float32, absolute, over the whole vocabulary: the two sum in other orders."""


@cache
def reference_model(variant: str) -> Any:
    return tiny_models.torch_model(variant)


def exact(variant: str, row: Row) -> NDArray[np.float64]:
    """(tokens of output, vocab): log softmax of transformers' logits before each."""
    with torch.inference_mode():
        logits = reference_model(variant)(torch.tensor([row.tokens])).logits[0, len(row.prompt) - 1 : -1]
    every: NDArray[np.float64] = torch.log_softmax(logits.double(), dim=1).numpy()
    return every


@contextmanager
def driver(tiny: TinyModels, variant: str, executor: str, **settings: Any) -> Iterator[SeamDriver]:
    # Without chunks every group has room for everything: the driver frees nothing.
    args = ServerArgs(
        executor=executor,
        cache_dir=str(tiny.cache_dir),
        threads=THREADS,
        max_total_tokens=1024,
        chunked_prefill_size=0,
        max_running_requests=8,
        **EXACT[executor],
        **settings,
    )
    made = create_executor(args, tiny.resolve(tiny.hf(variant)))
    try:
        yield SeamDriver(made)
    finally:
        made.shutdown()


def written(running: SeamDriver) -> list[Row]:
    """Three requests at once, in chunks, two steps in flight."""
    rows = [running.add(prompt, params) for prompt, params in zip(PROMPTS, STYLES, strict=True)]
    running.run(*rows, tokens=TOKENS, chunk=33, overlap=True)
    assert running.steps_on_top > TOKENS
    return rows


def told(row: Row) -> list[TokenLogprobs]:
    """Of each token; what it says agrees with itself."""
    found = [each for each in row.logprobs if each is not None]
    assert len(found) == len(row.output) >= TOKENS
    for each, token in zip(found, row.output, strict=True):
        assert each.chosen == each.of_ids[token]
        assert each.top == [each.of_ids[other] for other in each.top_ids] == sorted(each.of_ids, reverse=True)[: len(each.top)]
        assert np.exp(np.array(each.of_ids, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-5)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_in_float32_says_of_every_token_what_transformers_says(tiny: TinyModels, variant: str) -> None:
    with driver(tiny, variant, "torch") as running:
        for row, params in zip(written(running), STYLES, strict=True):
            found = told(row)
            assert {len(each.top) for each in found} == {params.top_logprobs_num}
            np.testing.assert_allclose([each.of_ids for each in found], exact(variant, row), rtol=0, atol=TOLERANCE)
            assert params.temperature == 0 or any(each.chosen < max(each.of_ids) for each in found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_says_of_every_token_nearly_what_transformers_says(tiny: TinyModels, variant: str) -> None:
    """In bfloat16: what that rounds off such small and sharp models. A logprob of another token or place is far off."""
    with driver(tiny, variant, "native") as running:
        for row in written(running):
            ours, theirs = np.array([each.of_ids for each in told(row)]), exact(variant, row)
            differences = np.abs(ours - theirs).mean(axis=1) / theirs.std()
            likeness = [np.corrcoef(mine, its)[0, 1] for mine, its in zip(ours, theirs, strict=True)]
            # A rounding may tip the choice between two experts: that token is another's.
            assert np.median(differences) < 0.1, differences
            assert np.median(likeness) > 0.99
            shifted = np.abs(ours[1:] - theirs[:-1]).mean(axis=1) / theirs.std()
            assert np.median(shifted) > 5 * np.median(differences)


def test_the_default_model_is_told_the_truth_of_what_it_says(smollm2: Path) -> None:
    """Over its own vocabulary, quantised: the distribution sums to one, and the likeliest token is what it says when greedy."""
    args = ServerArgs(threads=THREADS, max_total_tokens=1024, context_length=512)
    executor = create_executor(args, smollm2)
    vocab = tuple(range(49_152))
    params = SamplingParams(temperature=0.0, return_logprob=True, top_logprobs_num=20, token_ids_logprob=vocab)
    try:
        running = SeamDriver(executor)
        row = running.add([1, 504, 3575, 282, 4649, 314], params)
        running.run(row, tokens=4, overlap=True)
    finally:
        executor.shutdown()
    for each, token in zip(row.logprobs, row.output, strict=True):
        assert each is not None
        assert each.top_ids[0] == token
        assert each.top == sorted(each.of_ids, reverse=True)[:20]
        assert np.exp(np.array(each.of_ids, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-5)
