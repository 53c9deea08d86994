"""What tests of the native kernels share: the instruction sets to test, and bfloat16 in NumPy."""

import numpy as np
from numpy.typing import NDArray

from sterna.executor.native import _native

kernels = _native.kernels

Floats = NDArray[np.float32]


ISAS = sorted(_native.available_isas(), key="portable".__ne__)
"""The one that is compared with first."""
SIZES = [1, 15, 16, 17, 576]


def bits(x: Floats) -> NDArray[np.uint32]:
    """The representation, with one NaN for all: which NaN an operation gives is not promised."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), np.ascontiguousarray(x, np.float32).view(np.uint32))


def bfloat16(x: Floats) -> NDArray[np.uint16]:
    """To nearest, ties to even, as bits; x is finite and not subnormal."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def widened(x: NDArray[np.uint16]) -> Floats:
    return (x.astype(np.uint32) << 16).view(np.float32)


def ulps(got: Floats, want: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance in units of the last place of `want` as float32."""
    return np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
