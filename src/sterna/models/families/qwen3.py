"""Qwen3 (dense): Qwen2's windows, an RMS norm over each head of q and k, head_dim apart from the width, biases only where asked."""

from __future__ import annotations

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.qwen2 import Qwen2, layer_windows, refuse_gguf_window
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.spec import ModelSpec


class Qwen3(Qwen2):
    name = "qwen3"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"mlp_bias": (False,)})
        # Absent, these have the values of transformers' Qwen3Config.
        dims = hf_dimensions(fields, tensor_shapes, kv_heads=32, head_dim=128)
        bias = fields.flag("attention_bias", False)
        return dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            windows=layer_windows(fields, dims.num_layers, context_len),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
        )

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        refuse_gguf_window(fields, context_len)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        return dense_spec(dims, rope, qk_norm="head")
