"""Gemma 2: a norm before and after each half, embeddings scaled by the root of the width, soft caps, and a window on every other layer."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from sterna.models.families import rope_settings
from sterna.models.families.dense import DenseFamily, dense_spec
from sterna.models.families.dimensions import Dimensions, gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.names import HF_NAMES, Names
from sterna.models.families.windows import read_window, sliding_layers_from_gguf, sliding_layers_from_hf
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec, RopeSpec
from sterna.models.stored import AddOne, Source

_PERIOD = 2


class Gemma2(DenseFamily):
    name = "gemma2"
    hf_names: ClassVar[Names] = HF_NAMES.changed(
        {
            "attn_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    )

    def hf_source(self, spec: ModelSpec, canonical: str) -> Source:
        source = super().hf_source(spec, canonical)
        # Its norms multiply by 1 + weight. A GGUF's weights have the 1 in them.
        return Source(source.tensor, (AddOne(),)) if canonical.endswith("_norm") else source

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        dims = gemma_dimensions(fields, tensor_shapes, reads=("attn_logit_softcapping",))
        window = read_window(fields, "sliding_window", 4096, context_len=context_len)
        sliding = sliding_layers_from_hf(fields, dims.num_layers, [(layer + 1) % _PERIOD != 0 for layer in range(dims.num_layers)])
        bias = fields.flag("attention_bias", False)
        spec = dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            windows=lambda layer: window if sliding[layer] else None,
            scale=query_scale(fields),
            softcap=softcap(fields, "attn_logit_softcapping", 50.0),
            qkv_bias=bias,
            o_bias=bias,
            post_norm=True,
        )
        return with_ends(spec, softcap(fields, "final_logit_softcapping", 30.0))

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        reads = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern", "rope.freq_base_swa")
        dims = gguf_dimensions(fields, tensor_shapes, reads=reads, activation="gelu_tanh")
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        local = RopeSpec(rope_settings.theta_from_gguf(fields, "rope.freq_base_swa", rope.theta), rope.dim, rope.scaling)
        window = read_window(fields, "attention.sliding_window", 4096, context_len=context_len)
        sliding = sliding_layers_from_gguf(fields, dims.num_layers, _PERIOD)
        spec = dense_spec(
            dims,
            lambda layer: local if sliding[layer] else rope,
            windows=lambda layer: window if sliding[layer] else None,
            scale=gguf_query_scale(dims, largest_layers=46),
            softcap=softcap(fields, "attn_logit_softcapping", 50.0),
            post_norm=True,
        )
        return with_ends(spec, softcap(fields, "final_logit_softcapping", 30.0))


def gemma_dimensions(fields: Fields, shapes: Shapes, *, reads: tuple[str, ...]) -> Dimensions:
    """What both generations' configs have alike. Absent settings have the values of transformers' config classes."""
    fields.refuse({"mlp_bias": (False,)})
    return hf_dimensions(
        fields,
        shapes,
        reads=("query_pre_attn_scalar", "final_logit_softcapping", *reads),
        kv_heads=4,
        head_dim=256,
        # Not `hidden_act`, which their configs have too and transformers doesn't read.
        activation_in="hidden_activation",
        activation="gelu_pytorch_tanh",
    )


def query_scale(fields: Fields) -> float:
    return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar", 256.0, low=1e-3, high=1e6))


def gguf_query_scale(dims: Dimensions, *, largest_layers: int) -> float:
    """The format has no setting for it: llama.cpp knows the one model that differs, each generation's largest, by its number of layers."""
    divisor = dims.hidden_size // dims.num_heads if dims.num_layers == largest_layers else dims.head_dim
    return 1.0 / math.sqrt(divisor)


def softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """None where it is null, or absent without a default."""
    if fields.get(name) is None and (default is None or fields.mentions(name)):
        return None
    return fields.number(name, default, low=1e-3, high=1e6)


def with_ends(spec: ModelSpec, logit_softcap: float | None) -> ModelSpec:
    """The spec with what Gemma does to embeddings and logits."""
    return msgspec.structs.replace(spec, embed_scale=spec.hidden_size**0.5, logit_softcap=logit_softcap)
