"""Which packed format each weight gets (the formats: csrc/kernels/matrix.h; the table for users: docs/weights.md).

A type that is quantized already keeps its numbers. Floats become bfloat16, or what `--quantization` says.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import sterna.executor.native._native as _native
from sterna.errors import ConfigError, ModelError
from sterna.models.weights import WeightEntry

Quantization = Literal["none", "int8", "int4"]

INT4, INT8, BF16 = 0, 1, 2
"""`Matrix::quant`."""


class Format(NamedTuple):
    """How a matrix is packed; the fields of C++'s `Matrix` by the same names."""

    quant: int
    has_min: bool
    float32_scales: bool
    scale_group: int


class SourceType(NamedTuple):
    """A type that matrices are stored in."""

    block_cols: int
    block_bytes: int
    is_floats: bool
    format: Format
    """What it is packed in, unless it is floats and `--quantization` says otherwise."""


SOURCE_TYPES: dict[str, SourceType] = {
    name: SourceType(block_cols, block_bytes, is_floats, Format(*form))
    for name, (block_cols, block_bytes, is_floats, form) in _native.pack_sources().items()
}

_BF16 = Format(BF16, False, False, 32)
_INT8 = Format(INT8, False, False, 32)
_INT4 = Format(INT4, True, False, 32)


def format_of(name: str, entry: WeightEntry, quantization: Quantization) -> Format:
    """The format of the matrix with the canonical name `name`.

    A router stays bfloat16: it is small, and one wrong expert costs more than all its rounding. The embedding and the head get int8 at
    least: every token passes through them (docs/decisions/014-what-quantization-leaves-alone.md).
    Raises ModelError for a type that can't be packed, ConfigError for `--quantization` of weights that are quantized.
    """
    source = SOURCE_TYPES.get(entry.dtype)
    if source is None:
        types = ", ".join(SOURCE_TYPES)
        raise ModelError(f"{entry.file}: tensor {entry.tensor} is of type {entry.dtype}; the native engine can use {types}")
    if quantization == "none":
        return source.format
    if not source.is_floats:
        raise ConfigError(f"--quantization {quantization}: {entry.file} is quantized already (tensor {entry.tensor} is {entry.dtype})")
    if name.endswith(".router"):
        return _BF16
    return _INT8 if quantization == "int8" or name in ("embed", "head") else _INT4
