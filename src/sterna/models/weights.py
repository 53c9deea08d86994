"""Where each weight's bytes lie (`weights.json`), and reading them in canonical layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from sterna.errors import ModelError
from sterna.files.gguf import GGUFFile
from sterna.files.safetensors import SafetensorsFolder
from sterna.models.family import Family
from sterna.models.spec import ModelSpec, weight_shapes
from sterna.models.stored import AddOne, Rows, Source, Transform, Unpermute

Float32Array = NDArray[np.float32]

WEIGHTS_FILE = "weights.json"

_HF_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GGUF_HARMLESS = re.compile(r"(rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd)\.weight")
"""Tensors that say again what the spec's rope says."""


class WeightEntry(msgspec.Struct, frozen=True):
    """One canonical weight, as it is stored."""

    file: str
    """Path of the file that holds it."""
    tensor: str
    dtype: str
    """As the format names it: `BF16`, `Q4_1`, …"""
    shape: tuple[int, ...]
    """Of the canonical weight."""
    stored_shape: tuple[int, ...]
    transforms: tuple[Transform, ...] = ()
    """What makes the canonical weight of the stored tensor (`Source.transforms`)."""


class WeightIndex(msgspec.Struct, frozen=True):
    """Every weight that a spec needs, by canonical name."""

    format: Literal["gguf", "safetensors"]
    source: str
    """Path of the GGUF file, or of the folder that holds the safetensors files."""
    entries: dict[str, WeightEntry]

    def save(self, folder: Path) -> None:
        """Write `weights.json`."""
        (folder / WEIGHTS_FILE).write_bytes(msgspec.json.encode(self))

    @staticmethod
    def load(folder: Path) -> WeightIndex:
        """Read `weights.json`. Raises ModelError where it is absent or damaged."""
        try:
            return msgspec.json.decode((folder / WEIGHTS_FILE).read_bytes(), type=WeightIndex)
        except (OSError, msgspec.MsgspecError) as fault:
            raise ModelError(f"{folder}: not a resolved model folder: {fault}") from fault


class _Stored(NamedTuple):
    file: str
    dtype: str
    shape: tuple[int, ...]


def index_for_hf(spec: ModelSpec, family: Family, folder: SafetensorsFolder) -> WeightIndex:
    """Find every weight of the spec among a folder's tensors.

    Raises ModelError naming a tensor that is missing, misshapen, or there without the architecture having a place for it.
    """
    entries = _find(spec, _stored_in(folder), family.hf_source, _HF_HARMLESS)
    return WeightIndex("safetensors", str(folder.folder), entries)


def index_for_gguf(spec: ModelSpec, family: Family, file: GGUFFile) -> WeightIndex:
    """As `index_for_hf`, for a GGUF file."""
    entries = _find(spec, _stored_in(file), family.gguf_source, _GGUF_HARMLESS)
    return WeightIndex("gguf", str(file.path), entries)


def _stored_in(source: GGUFFile | SafetensorsFolder) -> dict[str, _Stored]:
    if isinstance(source, GGUFFile):
        return {name: _Stored(str(source.path), tensor.type, tensor.shape) for name, tensor in source.tensors.items()}
    return {name: _Stored(str(tensor.file), tensor.dtype, tensor.shape) for name, tensor in source.tensors.items()}


def _find(
    spec: ModelSpec, tensors: Mapping[str, _Stored], source_of: Callable[[ModelSpec, str], Source], harmless: re.Pattern[str]
) -> dict[str, WeightEntry]:
    entries: dict[str, WeightEntry] = {}
    surplus = dict(tensors)
    for canonical, shape in weight_shapes(spec).items():
        source = source_of(spec, canonical)
        expected = source.shape or shape
        stored = tensors.get(source.tensor)
        if stored is None:
            raise ModelError(f"tensor {source.tensor} is missing (expected, of shape {expected})")
        if stored.shape != expected:
            raise ModelError(f"{stored.file}: tensor {source.tensor} has shape {stored.shape}, expected {expected}")
        surplus.pop(source.tensor, None)
        entries[canonical] = WeightEntry(stored.file, source.tensor, stored.dtype, shape, stored.shape, source.transforms)
    for name, stored in surplus.items():
        if not harmless.fullmatch(name):
            raise ModelError(f"{stored.file}: tensor {name} of shape {stored.shape} has no place in this architecture")
    return entries


class RawMatrix(NamedTuple):
    """A matrix as it is stored: not one number of it is decoded."""

    dtype: str
    """As the format names it: a ggml type (`Q4_1`, `F32`, …) or a safetensors one (`BF16`, `F32`, …); `WeightIndex.format` says which."""
    rows: NDArray[np.uint8]
    """(shape[0], bytes of a row): row r holds the canonical row r's numbers, or whole quantised blocks of them, little-endian."""
    shape: tuple[int, int]
    """(out, in), in numbers."""


class WeightStore:
    """A model's weights in canonical layout, read when asked for. Not thread-safe."""

    def __init__(self, index: WeightIndex, source: GGUFFile | SafetensorsFolder) -> None:
        self.index = index
        self._source = source

    @staticmethod
    def open(folder: Path) -> WeightStore:
        """The weights of a resolved model folder.

        Raises ModelError where the index or a file of weights is absent or damaged, or where a file isn't as it was when indexed.
        """
        index = WeightIndex.load(folder)
        path = Path(index.source)
        source = GGUFFile.open(path) if index.format == "gguf" else SafetensorsFolder.open(path)
        stored = _stored_in(source)
        for entry in index.entries.values():
            if stored.get(entry.tensor) != (entry.file, entry.dtype, entry.stored_shape):
                raise ModelError(f"{entry.file}: tensor {entry.tensor} is not what it was when the model was resolved: resolve it again")
        return WeightStore(index, source)

    def names(self) -> Iterator[str]:
        return iter(self.index.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.index.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises KeyError for an unknown name."""
        return self.index.entries[name].shape

    def float32(self, name: str) -> Float32Array:
        """One weight, dequantized: a new, writable, C-contiguous array of `shape(name)`.

        Raises KeyError for an unknown name, ModelError for a type that can't be read as numbers.
        """
        entry = self.index.entries[name]
        values = self._source.float32(entry.tensor, _stored_rows(entry))
        for transform in entry.transforms:
            match transform:
                case Unpermute():
                    values = values[transform.canonical_rows(len(values))]
                case AddOne():
                    values += np.float32(1.0)
                case Rows():
                    pass  # only they were read
                case _:
                    assert_never(transform)
        return values

    def raw(self, name: str) -> RawMatrix:
        """One matrix, its rows in canonical order and their bytes as stored.

        A read-only view of the mapped file, which lives as long as the view does; a new array only where rows had to be permuted.
        Raises KeyError for an unknown name, ValueError for a vector: those are small, and may be other numbers than the stored ones
        (`AddOne`), so that `float32` is the way to read them.
        """
        entry = self.index.entries[name]
        if len(entry.shape) != 2:
            raise ValueError(f"{name} of shape {entry.shape} is no matrix")
        rows = self._source.raw(entry.tensor).reshape(prod(entry.stored_shape[:-1]), -1)[_stored_rows(entry) or slice(None)]
        for transform in entry.transforms:
            match transform:
                case Unpermute():
                    rows = rows[transform.canonical_rows(len(rows))]
                case Rows():
                    pass
                case AddOne():
                    raise ValueError(f"{name}: 1 is added to vectors only")
                case _:
                    assert_never(transform)
        return RawMatrix(entry.dtype, rows, (entry.shape[0], entry.shape[1]))


def _stored_rows(entry: WeightEntry) -> slice | None:
    """Which rows of the stored tensor, seen as a matrix, an entry is made of; None: all."""
    match entry.transforms:
        case (Rows(start=start), *_):
            return slice(start, start + entry.shape[0])
        case _:
            return None
