"""Reads packed matrices in NumPy, from the description in csrc/kernels/matrix.h alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT4, INT8, BF16 = 0, 1, 2


def block_sizes(quant: int, float32_scales: bool, scale_group: int, cols: int) -> tuple[int, int]:
    """Bytes of a block's quants, and of its scales."""
    groups = -(-cols // 32)
    quants = groups * {INT4: 256, INT8: 512, BF16: 1024}[quant]
    scales = 0 if quant == BF16 else groups * (32 // scale_group) * 16 * (4 if float32_scales else 2)
    return quants, scales


def unpack(form: tuple[int, bool, bool, int], rows: int, cols: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(rows, cols): each weight as the float32 value of d * q + m, or d * (q - zero)."""
    quant, has_min, float32_scales, scale_group = form
    blocks, groups = -(-rows // 16), -(-cols // 32)
    quants, scales = block_sizes(quant, float32_scales, scale_group, cols)
    block_bytes = -(-(quants + scales * (2 if has_min else 1)) // 64) * 64
    assert data.nbytes == blocks * block_bytes
    block = data.reshape(blocks, block_bytes)
    if quant == BF16:
        pairs = np.ascontiguousarray(block[:, :quants]).view("<u2").reshape(blocks, groups * 16, 16, 2)
        values = (pairs.astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 1, 3)
        return values.reshape(blocks * 16, groups * 32)[:rows, :cols]
    codes = _codes(quant, block[:, :quants].reshape(blocks, groups, -1, 16, 4))
    per_scale = codes.reshape(blocks * 16, -1, scale_group).astype(np.float32)
    d = _scales(block[:, quants : quants + scales], float32_scales)
    if has_min:
        m = _scales(block[:, quants + scales : quants + 2 * scales], float32_scales)
        values = d * per_scale + m
    else:
        values = d * (per_scale - np.float32(8 if quant == INT4 else 128))
    assert values.dtype == np.float32
    return values.reshape(blocks * 16, groups * 32)[:rows, :cols]


def _codes(quant: int, vectors: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(blocks, groups, vectors, 16 rows, 4) -> (blocks, 16 rows, groups, 32)"""
    if quant == INT4:
        vectors = np.concatenate([vectors & 15, vectors >> 4], axis=2)
    by_row = vectors.transpose(0, 3, 1, 2, 4)
    return by_row.reshape(*by_row.shape[:3], 32)


def _scales(block: NDArray[np.uint8], float32_scales: bool) -> NDArray[np.float32]:
    """-> (blocks * 16 rows, scale groups, 1)"""
    numbers = np.ascontiguousarray(block).view("<f4" if float32_scales else "<f2").astype(np.float32)
    return numbers.reshape(len(block), -1, 16).swapaxes(1, 2).reshape(len(block) * 16, -1, 1)
