"""Where each weight's bytes lie (`weights.json`), and reading them in canonical layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sterna.errors import ModelError
from sterna.files.gguf import GGUFFile
from sterna.files.safetensors import SafetensorsFile
from sterna.models.family import Family
from sterna.models.spec import ModelSpec, weight_shapes

Float32Array = NDArray[np.float32]

WEIGHTS_FILE = "weights.json"

_HF_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GGUF_HARMLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors whose contents the spec holds already (rope) or that follow from it."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as it lies in a file."""

    file: str
    dtype: str
    """As the format names it: `BF16`, `Q4_1`, …"""
    shape: tuple[int, ...]
    """Row-major."""


class Unpermute(msgspec.Struct, frozen=True, tag="unpermute"):
    """Stored rows are paired for interleaved rope, (2i, 2i + 1) within each head; canonical ones in halves, (i, i + head_dim / 2).

    Whole rows move, so that quantised blocks, which run along rows, stay as they are.
    """

    heads: int

    def canonical_rows(self, rows: int) -> NDArray[np.intp]:
        """(rows,): the stored row that each canonical row is."""
        return np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2).swapaxes(1, 2).reshape(rows)


class WeightEntry(msgspec.Struct, frozen=True):
    """One canonical weight."""

    file: str
    format: str
    """`gguf` or `safetensors`."""
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    transform: Unpermute | None = None


class WeightIndex(msgspec.Struct, frozen=True):
    """Every weight that a spec needs, by canonical name."""

    entries: dict[str, WeightEntry]

    def save(self, folder: Path) -> None:
        (folder / WEIGHTS_FILE).write_bytes(msgspec.json.encode(self))

    @staticmethod
    def load(folder: Path) -> WeightIndex:
        """Read `weights.json`. Raises ModelError where it is absent or damaged."""
        try:
            return msgspec.json.decode((folder / WEIGHTS_FILE).read_bytes(), type=WeightIndex)
        except (OSError, msgspec.MsgspecError) as fault:
            raise ModelError(f"{folder}: not a resolved model folder: {fault}") from fault


def index_for_hf(spec: ModelSpec, family: Family, tensors: Mapping[str, StoredTensor]) -> WeightIndex:
    """Find every weight of the spec among the tensors of one or more safetensors files.

    Raises ModelError naming a tensor that is missing, misshapen, or there without the spec having a place for it.
    """
    return _index(spec, "safetensors", tensors, family.hf_name, lambda canonical: None, _HF_HARMLESS)


def index_for_gguf(spec: ModelSpec, family: Family, tensors: Mapping[str, StoredTensor]) -> WeightIndex:
    """As `index_for_hf`, for GGUF files."""
    return _index(spec, "gguf", tensors, family.gguf_name, partial(family.gguf_permuted_heads, spec), _GGUF_HARMLESS)


class _Naming(Protocol):
    def __call__(self, canonical: str) -> str: ...


class _Permuting(Protocol):
    def __call__(self, canonical: str) -> int | None: ...


def _index(
    spec: ModelSpec,
    file_format: str,
    tensors: Mapping[str, StoredTensor],
    stored_name: _Naming,
    permuted_heads: _Permuting,
    harmless: re.Pattern[str],
) -> WeightIndex:
    entries: dict[str, WeightEntry] = {}
    surplus = dict(tensors)
    for canonical, shape in weight_shapes(spec).items():
        name = stored_name(canonical)
        stored = surplus.pop(name, None)
        if stored is None:
            raise ModelError(f"tensor {name} is missing (expected shape {shape})")
        if stored.shape != shape:
            raise ModelError(f"{stored.file}: tensor {name} has shape {stored.shape}, expected {shape}")
        heads = permuted_heads(canonical)
        transform = None if heads is None else Unpermute(heads)
        entries[canonical] = WeightEntry(stored.file, file_format, name, stored.dtype, shape, transform)
    for name, stored in surplus.items():
        if not harmless.fullmatch(name):
            raise ModelError(f"{stored.file}: tensor {name} (shape {stored.shape}) has no place in this architecture")
    return WeightIndex(entries)


class WeightStore:
    """A model's weights, read from its files when asked for, in canonical layout. Not thread-safe."""

    def __init__(self, index: WeightIndex) -> None:
        self.index = index
        self._files: dict[str, GGUFFile | SafetensorsFile] = {}

    @staticmethod
    def open(folder: Path) -> WeightStore:
        """The weights of a resolved model folder. Raises ModelError where its index is absent or damaged."""
        return WeightStore(WeightIndex.load(folder))

    def names(self) -> Iterator[str]:
        return iter(self.index.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.index.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self.index.entries[name].shape

    def float32(self, name: str) -> Float32Array:
        """One weight, dequantized, C-contiguous. Raises ModelError where its file can't be read, KeyError for an unknown name."""
        entry = self.index.entries[name]
        values = self._open(entry).float32(entry.tensor)
        if entry.transform is not None:
            values = values[entry.transform.canonical_rows(len(values))]
        return np.ascontiguousarray(values)

    def _open(self, entry: WeightEntry) -> GGUFFile | SafetensorsFile:
        opened = self._files.get(entry.file)
        if opened is None:
            path = Path(entry.file)
            opened = GGUFFile.open(path) if entry.format == "gguf" else SafetensorsFile.open(path)
            self._files[entry.file] = opened
        return opened
