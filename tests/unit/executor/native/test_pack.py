"""The packer in C++: what it keeps, what it rounds, what it refuses. Packed bytes are read by `unpack.py`, sources by the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.formats import BF16, INT4, INT8, SOURCE_TYPES, Format
from unit_native_unpack import unpack

BLOCK_TYPES = [name for name, source in SOURCE_TYPES.items() if not source.is_floats]
AS_BF16, AS_INT8, AS_INT4 = Format(BF16, False, False, 32), Format(INT8, False, False, 32), Format(INT4, True, False, 32)

SCALE_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where float16 numbers lie in each type's block."""


def test_every_block_type_is_tried() -> None:
    assert set(BLOCK_TYPES) == set(SCALE_OFFSETS)
