"""Granite 3: Llama's block with four multipliers: of the embeddings, of q·k, of what each half adds, and of the logits."""

from __future__ import annotations

import msgspec

from sterna.models.families import rope_settings
from sterna.models.families.dense import dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.llama import Llama, gguf_biases
from sterna.models.families.qwen2 import refuse_gguf_window
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import ModelSpec

_HF_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_GGUF_MULTIPLIERS = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")


class Granite(Llama):
    name = "granite"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        fields.refuse({"sliding_window": (0,), "layer_types": ([],)})
        dims = hf_dimensions(fields, tensor_shapes, reads=_HF_MULTIPLIERS)
        bias = fields.flag("attention_bias", False)
        # Absent, each is 1 in transformers' GraniteConfig, the one of q·k too.
        embedding, attention, residual, logits = (_multiplier(fields, name, 1.0) for name in _HF_MULTIPLIERS)
        spec = dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            scale=attention,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
            residual_scale=residual,
        )
        return msgspec.structs.replace(spec, embed_scale=embedding, logit_scale=1.0 / logits)

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes, reads=_GGUF_MULTIPLIERS)
        refuse_gguf_window(fields, context_len)
        # llama.cpp's switch for rope, for this architecture.
        fields.refuse({"rope.scaling.finetuned": (True,)})
        biases = gguf_biases(tensor_shapes)
        spec = dense_spec(
            dims,
            rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors),
            # 0 stands for what it is without the setting.
            scale=None if fields.get("attention.scale") in (None, 0) else _multiplier(fields, "attention.scale", None),
            qkv_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
            residual_scale=1.0 if fields.get("residual_scale") == 0 else _multiplier(fields, "residual_scale", 1.0),
        )
        return msgspec.structs.replace(
            spec,
            embed_scale=1.0 if fields.get("embedding_scale") == 0 else _multiplier(fields, "embedding_scale", 1.0),
            logit_scale=1.0 / _multiplier(fields, "logit_scale", None),
        )


def _multiplier(fields: Fields, name: str, default: float | None) -> float:
    return fields.number(name, default, low=1e-6, high=1e6)
