"""Qwen3 with experts: Qwen3's attention, and experts in place of the MLP in all layers or in some."""

from __future__ import annotations

from collections.abc import Callable

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import Dimensions, gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.experts import GGUF_READS, experts_from_gguf, experts_from_hf
from sterna.models.families.qwen2 import refuse_gguf_window
from sterna.models.families.qwen3 import Qwen3
from sterna.models.families.windows import read_window
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import GatedMLPSpec, ModelSpec, MoESpec

_MAX_INTERMEDIATE = 1 << 20


class Qwen3MoE(Qwen3):
    name = "qwen3_moe"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"mlp_bias": (False,), "layer_types": ([],)})
        # Absent settings have the values of transformers' Qwen3MoeConfig.
        dims = hf_dimensions(fields, tensor_shapes, reads=("num_experts", "num_local_experts"), kv_heads=4)
        bias = fields.flag("attention_bias", False)
        window = None
        if fields.flag("use_sliding_window", False):
            # transformers puts it on every layer here, whatever `max_window_layers` says.
            fields.refuse({"max_window_layers": (0,)})
            window = read_window(fields, "sliding_window", 4096, context_len=context_len)
        return dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            windows=lambda layer: window,
            mlp=_mlps(fields, dims),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
        )

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes, reads=GGUF_READS)
        refuse_gguf_window(fields, context_len)
        experts = experts_from_gguf(fields, dims)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        return dense_spec(dims, rope, mlp=lambda layer: experts, qk_norm="head")


def _mlps(fields: Fields, dims: Dimensions) -> Callable[[int], GatedMLPSpec | MoESpec]:
    """`mlp_only_layers` have a plain MLP, and so have those that are no multiple of `decoder_sparse_step`, counted from 1."""
    intermediate = fields.integer("moe_intermediate_size", 768, high=_MAX_INTERMEDIATE)
    normalize = fields.flag("norm_topk_prob", False)
    experts = experts_from_hf(fields, dims, experts=128, top_k=8, intermediate=intermediate, normalize=normalize)
    plain = GatedMLPSpec(dims.intermediate, dims.activation)
    step = fields.integer("decoder_sparse_step", 1, high=1 << 20)
    only = fields.get("mlp_only_layers")
    if only is None:
        only = []
    if not isinstance(only, list) or not all(isinstance(layer, int) for layer in only):
        raise fields.fault("mlp_only_layers", "must be a list of layers' numbers")
    return lambda layer: plain if layer in only or (layer + 1) % step else experts
