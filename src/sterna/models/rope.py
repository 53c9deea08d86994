"""The angles of rotary embedding: one function, pure NumPy, that every engine shares.

Formulas: linear, dynamic, yarn and llama3 as in transformers' `modeling_rope_utils.py`; factors as llama.cpp applies `rope_freqs.weight`.
"""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from sterna.models.spec import RopeDynamic, RopeFactors, RopeLinear, RopeLlama3, RopeLong, RopeSpec, RopeYarn

Float64Array = NDArray[np.float64]


def inverse_frequencies(rope: RopeSpec) -> tuple[Float64Array, float]:
    """The angle that each pair turns per position, and what cosine and sine are multiplied by.

    Returns (dim / 2,) float64, in radians per position, and the attention scale: pair i at position p is turned by
    `p * frequencies[i]` with `scale * cos` and `scale * sin`. Raises ValueError where factors don't fit `dim`.
    """
    scaling = rope.scaling
    match scaling:
        case None:
            return _plain(rope.theta, rope.dim), 1.0
        case RopeLinear():
            return _plain(rope.theta, rope.dim) / scaling.factor, 1.0
        case RopeDynamic():
            return _dynamic(rope, scaling), 1.0
        case RopeLlama3():
            return _llama3(rope, scaling), 1.0
        case RopeYarn():
            return _yarn(rope, scaling), _yarn_attention_scale(scaling)
        case RopeFactors():
            return _divided(rope, scaling.factors), 1.0
        case RopeLong():
            return _divided(rope, scaling.factors), scaling.attention_factor
        case _:
            assert_never(scaling)


def _plain(theta: float, dim: int) -> Float64Array:
    return 1.0 / np.power(theta, np.arange(0, dim, 2, dtype=np.float64) / dim)


def _divided(rope: RopeSpec, factors: tuple[float, ...]) -> Float64Array:
    if len(factors) * 2 != rope.dim:
        raise ValueError(f"{len(factors)} rope factors for {rope.dim // 2} pairs")
    return _plain(rope.theta, rope.dim) / np.asarray(factors, dtype=np.float64)


def _dynamic(rope: RopeSpec, scaling: RopeDynamic) -> Float64Array:
    # As transformers does for a sequence that fills the configured context; within the original window the base is as trained.
    length = max(scaling.context_len, scaling.original_max_position)
    stretch = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeSpec, scaling: RopeLlama3) -> Float64Array:
    frequencies = _plain(rope.theta, rope.dim)
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    """Full turns within the window that the model was first trained on."""
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(rope: RopeSpec, scaling: RopeYarn) -> Float64Array:
    def pair_turning(rotations: float) -> float:
        """Which (fractional) pair makes this many turns within the original window."""
        return rope.dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.dim - 1.0)
    if low == high:
        high += 0.001  # the ramp's slope stays finite

    frequencies = _plain(rope.theta, rope.dim)
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _yarn_attention_scale(scaling: RopeYarn) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
