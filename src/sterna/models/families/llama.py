"""Llama (1 to 3.x) and what was made in its shape (SmolLM2, TinyLlama, …); in GGUF the architecture `llama` is also Mistral's, and
Mixtral's where it counts experts."""

from __future__ import annotations

from typing import NamedTuple

from sterna.models.families import rope_settings
from sterna.models.families.dense import DenseFamily, dense_spec
from sterna.models.families.dimensions import gguf_dimensions, gguf_fields, hf_dimensions, hf_fields
from sterna.models.families.experts import GGUF_READS, experts_from_gguf
from sterna.models.families.windows import read_window
from sterna.models.family import NO_TENSORS, RopeTensors, Settings, Shapes
from sterna.models.spec import ModelSpec
from sterna.models.stored import Source, Unpermute


class Biases(NamedTuple):
    qkv: bool
    o: bool
    mlp: bool


def gguf_biases(shapes: Shapes) -> Biases:
    """The format has no setting for them: the tensors speak for themselves."""
    return Biases("blk.0.attn_q.bias" in shapes, "blk.0.attn_output.bias" in shapes, "blk.0.ffn_gate.bias" in shapes)


class Llama(DenseFamily):
    name = "llama"

    def spec_from_hf(self, config: Settings, tensor_shapes: Shapes, *, context_len: int) -> ModelSpec:
        fields = hf_fields(config)
        if read_window(fields, "sliding_window", None, context_len=context_len) is not None:
            raise fields.fault("sliding_window", "not a setting of llama that is supported")
        dims = hf_dimensions(fields, tensor_shapes)
        bias = fields.flag("attention_bias", False)
        return dense_spec(
            dims,
            rope_settings.rope_from_hf(fields, head_dim=dims.head_dim, context_len=context_len),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    def spec_from_gguf(
        self, metadata: Settings, tensor_shapes: Shapes, *, context_len: int, rope_tensors: RopeTensors = NO_TENSORS
    ) -> ModelSpec:
        fields = gguf_fields(metadata)
        dims = gguf_dimensions(fields, tensor_shapes, reads=GGUF_READS)
        experts = experts_from_gguf(fields, dims) if fields.get("expert_count") not in (None, 0) else None
        window = read_window(fields, "attention.sliding_window", None, context_len=context_len)
        biases = gguf_biases(tensor_shapes)
        return dense_spec(
            dims,
            rope_settings.rope_from_gguf(fields, tensor_shapes, head_dim=dims.head_dim, tensors=rope_tensors),
            windows=lambda layer: window,
            mlp=None if experts is None else lambda layer: experts,
            qkv_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
        )

    def gguf_source(self, spec: ModelSpec, canonical: str) -> Source:
        source = super().gguf_source(spec, canonical)
        # llama.cpp pairs neighbouring rows (2i, 2i + 1) for this architecture, and its converter reorders q and k so.
        stem = canonical.removesuffix(".bias")
        if not stem.endswith((".attn.q", ".attn.k")):
            return source
        mixer = spec.layers[int(stem.split(".")[1])].mixer
        return Source(source.tensor, (Unpermute(mixer.num_heads if stem.endswith(".q") else mixer.num_kv_heads),))
