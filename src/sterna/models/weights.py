"""Where each weight's bytes lie (`weights.json`), and reading them in canonical layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sterna.errors import ModelError
from sterna.files.gguf import GGUFFile
from sterna.files.safetensors import SafetensorsFolder
from sterna.models.family import Family
from sterna.models.spec import ModelSpec, weight_shapes

Float32Array = NDArray[np.float32]

WEIGHTS_FILE = "weights.json"

_HF_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_GGUF_HARMLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that say again what the spec's rope says."""


class Unpermute(msgspec.Struct, frozen=True, tag="unpermute"):
    """Stored rows are paired for interleaved rope, (2i, 2i + 1) within each head; canonical ones in halves, (i, i + head_dim / 2).

    Whole rows move, so that quantised blocks, which run along rows, stay as they are.
    """

    heads: int

    def canonical_rows(self, rows: int) -> NDArray[np.intp]:
        """(rows,): which stored row each canonical row is."""
        return np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2).swapaxes(1, 2).reshape(rows)


class WeightEntry(msgspec.Struct, frozen=True):
    """One canonical weight, as it is stored."""

    file: str
    """Path of the file that holds it."""
    tensor: str
    dtype: str
    """As the format names it: `BF16`, `Q4_1`, …"""
    shape: tuple[int, ...]
    transform: Unpermute | None = None


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
    stored = _stored_in(folder)
    entries = _find(spec, stored, family.hf_name, lambda canonical: None, _HF_HARMLESS)
    return WeightIndex("safetensors", str(folder.folder), entries)


def index_for_gguf(spec: ModelSpec, family: Family, file: GGUFFile) -> WeightIndex:
    """As `index_for_hf`, for a GGUF file."""
    stored = _stored_in(file)
    entries = _find(spec, stored, family.gguf_name, partial(family.gguf_permuted_heads, spec), _GGUF_HARMLESS)
    return WeightIndex("gguf", str(file.path), entries)


def _stored_in(source: GGUFFile | SafetensorsFolder) -> dict[str, _Stored]:
    if isinstance(source, GGUFFile):
        return {name: _Stored(str(source.path), tensor.type, tensor.shape) for name, tensor in source.tensors.items()}
    return {name: _Stored(str(tensor.file), tensor.dtype, tensor.shape) for name, tensor in source.tensors.items()}


def _find(
    spec: ModelSpec,
    tensors: Mapping[str, _Stored],
    stored_name: Callable[[str], str],
    permuted_heads: Callable[[str], int | None],
    harmless: re.Pattern[str],
) -> dict[str, WeightEntry]:
    entries: dict[str, WeightEntry] = {}
    surplus = dict(tensors)
    for canonical, shape in weight_shapes(spec).items():
        name = stored_name(canonical)
        stored = surplus.pop(name, None)
        if stored is None:
            raise ModelError(f"tensor {name} is missing (expected, of shape {shape})")
        if stored.shape != shape:
            raise ModelError(f"{stored.file}: tensor {name} has shape {stored.shape}, expected {shape}")
        heads = permuted_heads(canonical)
        entries[canonical] = WeightEntry(stored.file, name, stored.dtype, shape, None if heads is None else Unpermute(heads))
    for name, stored in surplus.items():
        if not harmless.fullmatch(name):
            raise ModelError(f"{stored.file}: tensor {name} of shape {stored.shape} has no place in this architecture")
    return entries


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
            if stored.get(entry.tensor) != (entry.file, entry.dtype, entry.shape):
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
        values = self._source.float32(entry.tensor)
        if entry.transform is not None:
            values = values[entry.transform.canonical_rows(len(values))]
        return values
