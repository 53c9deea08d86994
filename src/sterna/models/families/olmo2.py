"""OLMo 2: norms after each half and none before, and one norm over all heads of q and of k."""

from __future__ import annotations

from typing import ClassVar

from sterna.models.families import rope_settings
from sterna.models.families.dense import DenseFamily, dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.names import HF_NAMES, Names
from sterna.models.families.qwen2 import refuse_gguf_window
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.spec import ModelSpec


class Olmo2(DenseFamily):
    name = "olmo2"
    hf_names: ClassVar[Names] = HF_NAMES.changed(
        {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    )

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"mlp_bias": (False,), "sliding_window": (0,), "layer_types": ([],)})
        dims = hf_dimensions(fields, tensor_shapes, norm_eps=1e-5)
        bias = fields.flag("attention_bias", False)
        return dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="projection",
            pre_norm=False,
            post_norm=True,
        )

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes)
        # With windows the architecture is OLMo 3's.
        refuse_gguf_window(fields, context_len)
        rope = rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors)
        return dense_spec(dims, rope, qk_norm="projection", pre_norm=False, post_norm=True)
