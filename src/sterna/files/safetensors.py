"""Reading safetensors: one file, or a model's folder of one or many.

The format is the safetensors project's (its README), `model.safetensors.index.json` is transformers'.

    header length u64 | header: JSON of name -> {dtype, shape, data_offsets: [begin, end) in the data} | data

Headers are parsed here, because the safetensors package tells neither offsets nor gives bfloat16 to NumPy. Nothing in a file is trusted.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sterna.errors import ModelError
from sterna.files.layout import INDEX_FILE, weight_files
from sterna.files.mapped import MappedFile, bfloat16_to_float32, map_file

MAX_HEADER_BYTES = 100_000_000
"""The safetensors package's own limit."""

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16}
_BITS |= {"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4}
_READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafeTensor:
    name: str
    file: Path
    dtype: str
    """safetensors' name: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of `file`."""
    nbytes: int


class SafetensorsFile(MappedFile[SafeTensor]):
    """One mapped file; its tensors stand by offset."""

    @staticmethod
    def open(path: Path) -> SafetensorsFile:
        """Map the file and parse its header. Raises ModelError, naming the file, for whatever isn't a whole safetensors file."""
        data = map_file(path)
        return SafetensorsFile(path, _read_header(path, data), data)

    def float32(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """The tensor's values in its shape: a new, writable array. Raises ModelError for a type other than F64, F32, F16 and BF16.

        `rows`: only these, (rows, columns), of the tensor seen as a matrix, all axes but the last taken as one.
        """
        tensor = self.tensor(name)
        raw, shape = self.raw(name), tensor.shape
        if rows is not None:
            raw = raw.reshape(prod(shape[:-1]), -1)[rows]
            shape = (len(raw), shape[-1])
        if tensor.dtype == "BF16":
            return bfloat16_to_float32(raw.view("<u2")).reshape(shape)
        if tensor.dtype not in _READABLE:
            readable = ", ".join((*_READABLE, "BF16"))
            raise ModelError(f"{self.path}: tensor {name!r} is of type {tensor.dtype}; weights can be read from {readable} only")
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as it should
            return raw.view(_READABLE[tensor.dtype]).astype(np.float32).reshape(shape)


class SafetensorsFolder:
    """The tensors of one model, whichever files hold them."""

    def __init__(self, folder: Path, tensors: Mapping[str, SafeTensor], files: Mapping[Path, SafetensorsFile]) -> None:
        self.folder = folder
        self.tensors = tensors
        """Name -> record, by file and offset."""
        self._files = files

    @staticmethod
    def open(folder: Path) -> SafetensorsFolder:
        """Read every header. Raises ModelError, naming the file, where one is absent, damaged or disagrees with the index."""
        files: dict[Path, SafetensorsFile] = {}
        tensors: dict[str, SafeTensor] = {}
        for path, names in weight_files(folder).items():
            files[path] = SafetensorsFile.open(path)
            found = files[path].tensors
            missing = [name for name in names or () if name not in found]
            if missing:
                raise ModelError(f"{path}: tensor {missing[0]!r} isn't in it, though {INDEX_FILE} says so ({len(missing)} such)")
            # Where an index exists it alone says which shard a tensor is read from.
            tensors |= {name: tensor for name, tensor in found.items() if names is None or name in names}
        return SafetensorsFolder(folder, tensors, files)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As `SafetensorsFile.raw`. Raises ModelError where the folder has no such tensor."""
        return self._file_of(name).raw(name)

    def float32(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """As `SafetensorsFile.float32`. Raises ModelError where the folder has no such tensor."""
        return self._file_of(name).float32(name, rows)

    def _file_of(self, name: str) -> SafetensorsFile:
        try:
            return self._files[self.tensors[name].file]
        except KeyError:
            raise ModelError(f"{self.folder}: there is no tensor {name!r}") from None


def _read_header(file: Path, data: mmap.mmap) -> dict[str, SafeTensor]:
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ModelError(f"{file}: damaged or not a safetensors file: a header of {length} bytes in a file of {size}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ModelError(f"{file}: damaged or not a safetensors file: its header can't be read: {fault}") from fault
    tensors = [_tensor(file, name, entry, 8 + length, size) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    for before, after in pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            raise ModelError(f"{file}: damaged: tensors {before.name!r} and {after.name!r} overlap")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: Path, name: str, entry: _Entry, start: int, size: int) -> SafeTensor:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or start + end > size:
        raise ModelError(f"{file}: tensor {name!r} lies at bytes {begin} to {end} of the data, which has {size - start} (cut short?)")
    if entry.dtype not in _BITS:
        raise ModelError(f"{file}: tensor {name!r} is of type {entry.dtype!r}, which isn't known")
    if any(extent < 0 for extent in entry.shape) or prod(entry.shape) * _BITS[entry.dtype] != 8 * (end - begin):
        raise ModelError(f"{file}: tensor {name!r} has {end - begin} bytes, which isn't what {entry.dtype} of shape {entry.shape} takes")
    return SafeTensor(name, file, entry.dtype, entry.shape, start + begin, end - begin)
