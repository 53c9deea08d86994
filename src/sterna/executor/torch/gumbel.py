"""The noise of `executor/philox.py` on tensors: the same numbers, four candidates at a time.

PyTorch has no unsigned 32-bit arithmetic, so words are int64 in [0, 2^32). A product of two wraps modulo 2^64 into the sign, which
neither the masked upper half nor the lower one notices.
"""

from __future__ import annotations

import torch

from sterna.executor.philox import PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS

_LOW_32 = 0xFFFFFFFF


def block_noise(key_low: torch.Tensor, key_high: torch.Tensor, output_index: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """(M, 4) float32: the noise of candidates 4 * block .. 4 * block + 3; all arguments (M,) int64."""
    c0, c1 = block, output_index
    c2 = c3 = torch.zeros_like(block)
    k0, k1 = key_low, key_high
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0 = _high(p1).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = _high(p0).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_LOW_32), p0.bitwise_and_(_LOW_32)
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]).bitwise_and_(_LOW_32), (k1 + PHILOX_KEY_STEPS[1]).bitwise_and_(_LOW_32)
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    uniform = words.bitwise_right_shift_(8).to(torch.float64).add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _high(product: torch.Tensor) -> torch.Tensor:
    return product.bitwise_right_shift(32).bitwise_and_(_LOW_32)
