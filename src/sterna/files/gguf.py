"""Reading GGUF files, versions 2 and 3, little-endian (the format: ggml's docs/gguf.md).

The file is mapped, not read: opening costs the header, a tensor costs its own bytes. The header is parsed here and not by the gguf package,
whose reader makes NumPy arrays of every token (seconds for a large vocabulary). Nothing in a file is trusted: every count and offset
is checked against what is left of the file before anything is allocated for it.

    magic "GGUF" | version u32 | tensor count u64 | pair count u64
    pairs: key string, value type u32, value
    tensors: name string, rank u32, sizes u64 each (innermost first), ggml type u32, offset u64 from the data section
    padding to `general.alignment` (32) | data section
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from sterna.errors import ModelError
from sterna.files.mapped import MappedFile, bfloat16_to_float32, map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_RANK = 4
"""ggml's GGML_MAX_DIMS."""
MAX_ARRAY_DEPTH = 4
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_HEADER_BYTES = 1 << 30
"""Bounds far above any real model's, so that a hostile file can't make Python objects many times its own size."""
MIN_PAIR_BYTES = 8 + 4 + 1
"""An empty key, a type, a one-byte value: bounds the pair count before any is read."""
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_SCALARS = {code: struct.Struct(form) for code, form in _SCALAR_FORMATS.items()}
"""GGUF value type -> its layout; bool, string and array are handled by hand."""

_PLAIN: dict[str, str] = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""ggml types that NumPy reads as they are."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]
    """NumPy's order, (rows, columns): ggml's sizes reversed."""
    type: str
    """ggml's name of the type: `F32`, `Q4_1`, …"""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile(MappedFile[GGUFTensor]):
    """One mapped file; its tensors stand in the file's order."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], data: mmap.mmap) -> None:
        super().__init__(path, tensors, data)
        self.metadata = metadata
        """Key -> str, int, float, bool, or a list of these."""

    @staticmethod
    def open(path: Path) -> GGUFFile:
        """Map the file and parse its header. Raises ModelError, naming the file, for whatever isn't a whole GGUF file of version 2 or 3."""
        data = map_file(path)
        reader = _HeaderReader(path, data)
        num_tensors, num_pairs = _preamble(reader)
        metadata = _read_pairs(reader, num_pairs)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            reader.fail(f"general.alignment is {alignment!r}, not a power of two")
        tensors = _read_tensors(reader, num_tensors, alignment)
        return GGUFFile(path, metadata, tensors, data)

    def float32(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """The tensor's values in its shape: a new, writable array.

        `rows`: only these, (rows, columns), of the tensor seen as a matrix, all axes but the last taken as one.
        Raises ModelError for a type that neither NumPy nor the gguf package can turn into numbers.
        """
        tensor = self.tensor(name)
        raw = self.raw(name).reshape(prod(tensor.shape[:-1]), -1)
        values = self._numbers(tensor, raw if rows is None else raw[rows])
        return values.reshape(tensor.shape if rows is None else (-1, tensor.shape[-1]))

    def _numbers(self, tensor: GGUFTensor, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        if tensor.type in _PLAIN:
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as it should
                return raw.view(_PLAIN[tensor.type]).astype(np.float32)
        if tensor.type == "BF16":
            return bfloat16_to_float32(raw.view("<u2"))
        from gguf.quants import dequantize  # 10 ms that a reader of metadata needn't spend

        try:
            # A hostile scale may be NaN or infinite: the numbers say so, and no warning is owed.
            with np.errstate(all="ignore"):
                values = dequantize(raw, GGMLQuantizationType[tensor.type])
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {tensor.name!r} is of type {tensor.type}, which can't be read as numbers") from None
        return np.ascontiguousarray(values, np.float32)


class _HeaderReader:
    """A cursor that can't leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.at = 0
        self.elements = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: damaged or not a GGUF file: {what}")

    def take(self, count: int, what: str) -> int:
        """Move over `count` bytes and return where they begin."""
        start = self.at
        if count > self.end - start:
            self.fail(f"{what} needs {count} bytes at {start}, but the header can't reach beyond {self.end}")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row. Written for vocabularies, hence the bare loop: every name in it is local."""
        data, end, at, unpack = self.data, self.end, self.at, _U64.unpack_from
        result = []
        for i in range(count):
            start = at + 8
            if start > end:
                self.fail(f"string {i} of {what} begins at {at}, but the header can't reach beyond {end}")
            at = start + unpack(data, at)[0]
            if at > end:
                self.fail(f"string {i} of {what} claims {at - start} bytes at {start}, but the header can't reach beyond {end}")
            try:
                result.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                self.fail(f"string {i} of {what} isn't UTF-8")
        self.at = at
        return result

    def value(self, code: int, what: str, depth: int = 0) -> Any:
        if code in _SCALARS:
            layout = _SCALARS[code]
            return layout.unpack_from(self.data, self.take(layout.size, what))[0]
        if code == _BOOL:
            return self.data[self.take(1, what)] != 0
        if code == _STRING:
            return self.string(what)
        if code != _ARRAY:
            self.fail(f"{what} has the unknown value type {code}")
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests more than {MAX_ARRAY_DEPTH} arrays")
        return self._array(what, depth)

    def _array(self, what: str, depth: int) -> list[Any]:
        code, count = self.u32(what), self.u64(what)
        self.elements += count
        if self.elements > MAX_ARRAY_ELEMENTS:
            self.fail(f"{what} has {count} elements; all arrays together may have {MAX_ARRAY_ELEMENTS}")
        if code in _SCALARS:
            layout = _SCALARS[code]
            start = self.take(count * layout.size, what)
            values: list[Any] = np.frombuffer(self.data, layout.format, count, start).tolist()
            return values
        if code == _BOOL:
            start = self.take(count, what)
            return [byte != 0 for byte in self.data[start : self.at]]
        smallest = 8 if code == _STRING else 12
        if count > (self.end - self.at) // smallest:
            self.fail(f"{what} claims {count} elements, more than the file can hold")
        if code == _STRING:
            return self.strings(count, what)
        return [self.value(code, what, depth + 1) for _ in range(count)]


def _preamble(reader: _HeaderReader) -> tuple[int, int]:
    """(tensor count, pair count), checked against the file's size."""
    magic = reader.data[:4]
    if magic != MAGIC:
        raise ModelError(f"{reader.path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    reader.at = 4
    version = reader.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ModelError(f"{reader.path}: a big-endian GGUF file; only little-endian ones can be read")
        raise ModelError(f"{reader.path}: GGUF version {version} can't be read, only {' and '.join(map(str, VERSIONS))}")
    num_tensors, num_pairs = reader.u64("the tensor count"), reader.u64("the metadata count")
    for count, smallest, what in ((num_tensors, MIN_TENSOR_BYTES, "tensors"), (num_pairs, MIN_PAIR_BYTES, "metadata pairs")):
        if count > (reader.size - reader.at) // smallest:
            reader.fail(f"it claims {count} {what}, more than a file of {reader.size} bytes can hold")
    return num_tensors, num_pairs


def _read_pairs(reader: _HeaderReader, count: int) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for i in range(count):
        key = reader.string(f"metadata key {i}")
        if key in pairs:
            reader.fail(f"metadata key {key!r} occurs twice")
        pairs[key] = reader.value(reader.u32(key), key)
    return pairs


def _read_tensors(reader: _HeaderReader, count: int, alignment: int) -> dict[str, GGUFTensor]:
    """The records, with offsets made absolute. The data section begins where the header ends, aligned."""
    relative = [_read_tensor(reader, i) for i in range(count)]
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in relative:
        if tensor.name in tensors:
            reader.fail(f"tensor {tensor.name!r} occurs twice")
        if tensor.offset % alignment:
            reader.fail(f"tensor {tensor.name!r} lies at {tensor.offset}, which isn't a multiple of the alignment {alignment}")
        offset = start + tensor.offset
        if offset + tensor.nbytes > reader.size:
            reader.fail(f"tensor {tensor.name!r} ends at byte {offset + tensor.nbytes}, but the file ends at {reader.size} (cut short?)")
        tensors[tensor.name] = GGUFTensor(tensor.name, tensor.shape, tensor.type, offset, tensor.nbytes)
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(by_offset):
        if before.offset + before.nbytes > after.offset:
            reader.fail(f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors


def _read_tensor(reader: _HeaderReader, i: int) -> GGUFTensor:
    """One record; its offset is still relative to the data section."""
    name = reader.string(f"the name of tensor {i}")
    rank = reader.u32(name)
    if not 1 <= rank <= MAX_RANK:
        reader.fail(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(reader.u64(name) for _ in range(rank))[::-1]
    code, offset = reader.u32(name), reader.u64(name)
    try:
        kind = GGMLQuantizationType(code)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(f"{reader.path}: tensor {name!r} is of ggml type {code}, which isn't known") from None
    if 0 in shape or shape[-1] % block_elements:
        reader.fail(f"tensor {name!r} has shape {shape}, impossible for {kind.name} (blocks of {block_elements})")
    return GGUFTensor(name, shape, kind.name, offset, prod(shape) // block_elements * block_bytes)
