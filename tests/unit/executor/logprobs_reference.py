"""What `TokenLogprobs` promises, in float64 and the plainest way, and logits to ask it of."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.protocol.logprobs import LEAST_LOGPROB, TokenLogprobs
from sterna.protocol.sampling import SamplingParams

Float32Array = NDArray[np.float32]
KINDS = ["plain", "ties", "flat", "peaked", "huge", "holes", "one"]
"""Of logits; `holes` are -inf, `one` has but one token that isn't."""


def logits_of(kind: str, vocab: int, seed: int) -> Float32Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(vocab) * 3
    match kind:
        case "ties":
            x = np.round(x)  # -0.0 and 0.0 among them
        case "flat":
            x[:] = -1.5
        case "peaked":
            x[rng.integers(vocab)] += 30
        case "huge":
            x = np.clip(x * 1e38, -3e38, 3e38)
        case "holes":
            x[rng.random(vocab) < 0.5] = -np.inf
            x[rng.integers(vocab)] = 0
        case "one":
            x[np.arange(vocab) != 3 * vocab // 4] = -np.inf
    return x.astype(np.float32)


def expected(logits: Float32Array, params: SamplingParams, token: int) -> TokenLogprobs:
    x = logits.astype(np.float64)
    every = np.maximum(x - x.max() - np.log(np.exp(x - x.max()).sum()), LEAST_LOGPROB)
    top = [int(i) for i in np.argsort(-x, kind="stable") if x[i] > -np.inf][: params.top_logprobs_num]
    return TokenLogprobs.pack(every[token], top, every[top].tolist(), every[list(params.token_ids_logprob)].tolist())


def assert_near(told: TokenLogprobs | None, exact: TokenLogprobs, *, tolerance: float = 1e-6) -> None:
    """The same tokens; numbers within `tolerance`, absolute below 1 and relative above, all finite."""
    assert told is not None
    assert told.top_ids == exact.top_ids
    ours, theirs = ([each.chosen, *each.top, *each.of_ids] for each in (told, exact))
    assert np.isfinite(ours).all()
    assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
