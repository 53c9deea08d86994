"""What the decoders that are shaped after Llama have in common: names, and a spec from their dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from sterna.models.families import rope_settings
from sterna.models.families.dimensions import Dimensions, gguf_fields, hf_fields
from sterna.models.families.names import GGUF_NAMES, HF_NAMES, Names, Place
from sterna.models.family import Family, Settings
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec, kv_groups
from sterna.models.stored import Rows, Source


class DenseFamily(Family):
    """What the family files don't repeat: names, context length, rows that lie canonically, and stacks of experts in GGUF."""

    hf_names: ClassVar[Names] = HF_NAMES
    gguf_names: ClassVar[Names] = GGUF_NAMES

    def context_len_from_hf(self, config: Settings) -> int:
        return rope_settings.context_len_from_hf(hf_fields(config))

    def context_len_from_gguf(self, metadata: Settings) -> int:
        return rope_settings.context_len_from_gguf(gguf_fields(metadata))

    def hf_source(self, spec: ModelSpec, canonical: str) -> Source:
        return Source(self.hf_names.stored(Place.of(canonical)))

    def gguf_source(self, spec: ModelSpec, canonical: str) -> Source:
        place = Place.of(canonical)
        name = self.gguf_names.stored(place)
        mlp = spec.layers[place.layer].mlp if place.layer is not None else None
        if place.expert is None or not isinstance(mlp, MoESpec):
            return Source(name)
        rows, columns = mlp.intermediate, spec.hidden_size
        if place.part.endswith(".down"):
            rows, columns = columns, rows
        return Source(name, (Rows(place.expert * rows),), (mlp.num_experts, rows, columns))


def dense_spec(
    dims: Dimensions,
    rope: RopeSpec | Callable[[int], RopeSpec | None],
    *,
    windows: Callable[[int], int | None] = lambda layer: None,
    mlp: Callable[[int], GatedMLPSpec | MoESpec] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["head", "projection"] | None = None,
    pre_norm: bool = True,
    post_norm: bool = False,
    residual_scale: float = 1.0,
) -> ModelSpec:
    """The spec of a decoder all of whose layers are alike but for what is a function of the layer: `windows`, and where they are given
    `rope` and `mlp`. `scale` of q·k: 1 / sqrt(head_dim) where it isn't given."""
    gated = GatedMLPSpec(dims.intermediate, dims.activation, mlp_bias)

    def layer(index: int) -> LayerSpec:
        mixer = AttentionSpec(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            scale=dims.head_dim**-0.5 if scale is None else scale,
            rope=rope if isinstance(rope, RopeSpec) else rope(index),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            softcap=softcap,
            window=windows(index),
        )
        return LayerSpec(mixer, mlp(index) if mlp else gated, dims.norm_eps, pre_norm, post_norm, residual_scale)

    layers = tuple(layer(index) for index in range(dims.num_layers))
    return ModelSpec(
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=layers,
        kv_groups=kv_groups(layers),
        final_norm_eps=dims.norm_eps,
        tied_head=dims.tied_head,
    )
