"""Opens model files through the product's parts, one by one, without its cache."""

from __future__ import annotations

import json
from pathlib import Path

from sterna.files.gguf import GGUFFile
from sterna.files.safetensors import SafetensorsFolder
from sterna.models.family import Family
from sterna.models.registry import family_of_gguf, family_of_hf
from sterna.models.spec import ModelSpec
from sterna.models.weights import WeightIndex, WeightStore


def open_hf(folder: Path) -> tuple[ModelSpec, Family, SafetensorsFolder]:
    config = json.loads((folder / "config.json").read_text())
    family, source = family_of_hf(config), SafetensorsFolder.open(folder)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    return family.spec_from_hf(config, shapes, context_len=512), family, source


def open_gguf(path: Path) -> tuple[ModelSpec, Family, GGUFFile]:
    source = GGUFFile.open(path)
    family = family_of_gguf(source.metadata)
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    tensors = {name: source.float32(name).tolist() for name in shapes if name.startswith("rope_")}
    return family.spec_from_gguf(source.metadata, shapes, context_len=512, rope_tensors=tensors), family, source


def reopened(index: WeightIndex, folder: Path) -> WeightStore:
    folder.mkdir(exist_ok=True)
    index.save(folder)
    return WeightStore.open(folder)
