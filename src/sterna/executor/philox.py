"""The random stream of sampling: its definition, in NumPy. Every engine draws these numbers, so a replay anywhere draws the same tokens.

The noise of one candidate token is a pure function of (seed, output index, token id); nothing is drawn in sequence, so a row's tokens
can't depend on its neighbours or on which candidates a filter dropped:

    key      = (seed mod 2^32, seed div 2^32)
    counter  = (token_id div 4, output_index, 0, 0)                words 2 and 3 are kept for other uses of a request's stream
    x        = Philox4x32-10(counter, key)[token_id mod 4]         32 bits
    u        = ((x div 2^8) + 1/2) / 2^24                          in (0, 1), exact in float64: never 0, never 1
    noise    = float32(-ln(-ln(u)))                                logarithms in float64, rounded once

and the sampled token is the candidate with the largest float32 sum `z + noise`, the lowest id on ties, where z is its filtered logit
(executor/torch/sampler.py has the order of the filters). That draws from softmax(z) (Gumbel-max).

Two mathematical libraries may differ in the last bit of a float64 logarithm; the float32 result differs only where that bit decides a
rounding, about once in 2^28 values, and a token only where two candidates then lie within that one rounding of each other.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

NOISE_MIN = -math.log(25 * math.log(2))
NOISE_MAX = -math.log(-math.log1p(-(2.0**-25)))
"""The noise lies in [NOISE_MIN, NOISE_MAX], about -2.86 to 17.33, so a candidate further than their difference below another can't win."""

_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox4x32-10 of counters (..., 4) under keys (..., 2), broadcast; (..., 4) uint32."""
    words, halves = np.asarray(counter, dtype=np.uint64), np.asarray(key, dtype=np.uint64)
    c0, c1, c2, c3 = (words[..., i] for i in range(4))
    k0, k1 = halves[..., 0], halves[..., 1]
    m0, m1 = (np.uint64(m) for m in PHILOX_MULTIPLIERS)
    s0, s1 = (np.uint64(s) for s in PHILOX_KEY_STEPS)
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW_32, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW_32
        k0, k1 = (k0 + s0) & _LOW_32, (k1 + s1) & _LOW_32
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def sampling_noise(seed: int, output_index: int, token_ids: ArrayLike) -> NDArray[np.float32]:
    """The noise of candidates `token_ids` (N,) for output token `output_index` of a request: (N,) float32."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    counter = np.zeros((*ids.shape, 4), dtype=np.uint64)
    counter[..., 0] = ids // np.uint64(4)
    counter[..., 1] = output_index
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    bits = np.take_along_axis(words, (ids % np.uint64(4)).astype(np.intp)[..., None], axis=-1)[..., 0]
    uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise
