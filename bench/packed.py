"""Weights packed in memory, as the native engine reads them: without a file and without the cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.formats import Format
from sterna.executor.native.packed_file import ALIGNMENT, MatrixRecord, PackedHeader, VectorRecord, align
from sterna.models.spec import ModelSpec, weight_shapes


class PackedInMemory:
    """Room for every weight of a spec, zeros until filled; what `packed_file.py: PackedModel` offers, but writable."""

    def __init__(self, spec: ModelSpec, form: Callable[[str], Format], quantization: str = "none") -> None:
        """`form`: the format of each matrix, by name."""
        matrices: dict[str, MatrixRecord] = {}
        vectors: dict[str, VectorRecord] = {}
        offset = 0
        for name, shape in weight_shapes(spec).items():
            if len(shape) == 1:
                vectors[name] = VectorRecord(offset, shape[0])
                nbytes = 4 * shape[0]
            else:
                nbytes = _native.matrix_bytes(form(name), *shape)
                matrices[name] = MatrixRecord(*form(name), *shape, offset, nbytes)
            offset = align(offset + nbytes, ALIGNMENT)
        self.header = PackedHeader(quantization, offset, matrices, vectors)
        self._data = np.frombuffer(mmap.mmap(-1, offset), np.uint8)

    def matrix_bytes(self, name: str) -> NDArray[np.uint8]:
        record = self.header.matrices[name]
        return self._data[record.offset : record.offset + record.nbytes]

    def vector(self, name: str) -> NDArray[np.float32]:
        record = self.header.vectors[name]
        return self._data[record.offset : record.offset + 4 * record.count].view(np.float32)


def pack(values: NDArray[np.float32], form: Format, threads: int) -> NDArray[np.uint8]:
    """A matrix of floats, packed. Raises ValueError for one that can't be."""
    packed: NDArray[np.uint8] = np.empty(_native.matrix_bytes(form, *values.shape), np.uint8)
    rows = np.ascontiguousarray(values).view(np.uint8)
    if fault := _native.pack_rows("F32", form, values.shape[1], rows, packed, threads):
        raise ValueError(f"row {fault[0]} has {fault[1]}")
    return packed
