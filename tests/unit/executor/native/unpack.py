"""Reads packed matrices in NumPy, from the description in csrc/kernels/matrix.h alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT4, INT8, BF16 = 0, 1, 2


def unpack(form: tuple[int, bool, bool, int], rows: int, cols: int, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(rows, cols): each weight as the float32 value of d * q + m, or d * (q - zero)."""
    quant, has_min, float32_scales, scale_group = form
    blocks, groups = -(-rows // 16), -(-cols // 32)
    block = data.reshape(blocks, -1)
    if quant == BF16:
        assert block.shape[1] == groups * 1024
        pairs = block.view("<u2").reshape(blocks, groups * 16, 16, 2)
        values = (pairs.astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 1, 3)
        return values.reshape(blocks * 16, groups * 32)[:rows, :cols]
    quant_bytes = {INT4: 256, INT8: 512}[quant]
    scale_bytes = 32 // scale_group * 16 * (4 if float32_scales else 2)
    group_bytes = quant_bytes + scale_bytes * (2 if has_min else 1)
    assert block.shape[1] == -(-groups * group_bytes // 64) * 64
    group = block[:, : groups * group_bytes].reshape(blocks, groups, group_bytes)
    codes = _codes(quant, group[:, :, :quant_bytes].reshape(blocks, groups, -1, 16, 4))
    per_scale = codes.reshape(blocks * 16, -1, scale_group).astype(np.float32)
    d = _scales(group[:, :, quant_bytes : quant_bytes + scale_bytes], float32_scales)
    if has_min:
        values = d * per_scale + _scales(group[:, :, quant_bytes + scale_bytes :], float32_scales)
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


def _scales(stored: NDArray[np.uint8], float32_scales: bool) -> NDArray[np.float32]:
    """(blocks, groups, bytes) -> (blocks * 16 rows, scale groups, 1)"""
    numbers = np.ascontiguousarray(stored).view("<f4" if float32_scales else "<f2").astype(np.float32)
    return numbers.reshape(len(stored), -1, 16).swapaxes(1, 2).reshape(len(stored) * 16, -1, 1)
