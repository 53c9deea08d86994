"""What a model family is: the translation of two file formats' settings and tensor names into a `ModelSpec` and its canonical names."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sterna.models.spec import ModelSpec
from sterna.models.stored import Source

Settings = Mapping[str, object]
"""A parsed config.json, or a GGUF's metadata by key."""
Shapes = Mapping[str, tuple[int, ...]]
"""Stored tensors' shapes by stored name, row-major: a matrix is (out, in) in both formats."""


ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT)
"""GGUF's tensors that are settings: what a spec says of rope comes from their contents."""
RopeTensors = Mapping[str, Sequence[float]]
"""Contents by name."""
NO_TENSORS: RopeTensors = MappingProxyType({})


class Family(abc.ABC):
    """One architecture. Stateless; every method but `…_source` raises ModelError, naming the setting at fault."""

    name: str
    """Its row in `registry.FAMILIES`."""

    @abc.abstractmethod
    def context_len_from_hf(self, config: Settings) -> int:
        """Tokens of context that the model was made for, scaled rope included."""

    @abc.abstractmethod
    def context_len_from_gguf(self, metadata: Settings) -> int:
        """As `context_len_from_hf`."""

    @abc.abstractmethod
    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        """`context_len` is the configured one: it fixes dynamic and long rope, and windows no smaller than it are no windows."""

    @abc.abstractmethod
    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        """`rope_tensors`: the contents of those of `ROPE_TENSORS` that the file has."""

    @abc.abstractmethod
    def hf_source(self, spec: ModelSpec, canonical: str) -> Source:
        """What a canonical weight (see `models/spec.py`) is made of in a safetensors file."""

    @abc.abstractmethod
    def gguf_source(self, spec: ModelSpec, canonical: str) -> Source:
        """What a canonical weight is made of in a GGUF file."""
