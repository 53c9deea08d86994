"""Mistral (7B and those in its shape): Llama's block with a sliding window over every layer. In GGUF it goes by `llama`."""

from __future__ import annotations

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import hf_dimensions, hf_fields
from sterna.models.families.llama import Llama
from sterna.models.families.windows import read_window
from sterna.models.family import Settings, Shapes
from sterna.models.spec import ModelSpec


class Mistral(Llama):
    name = "mistral"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"attention_bias": (False,), "mlp_bias": (False,), "layer_types": ([],)})
        # Absent, these two have the values of transformers' MistralConfig; null means none, and as many as heads.
        window = read_window(fields, "sliding_window", 4096, context_len=context_len)
        dims = hf_dimensions(fields, tensor_shapes, kv_heads=8)
        rope = rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len)
        return dense_spec(dims, rope, windows=lambda layer: window)
