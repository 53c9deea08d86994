"""What the dense pre-norm decoders (Llama and those shaped after it) have in common: dimensions, names, and the settings they refuse.

The block: RMS norm, grouped-query attention with rope, RMS norm, gated MLP; each half added to the stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sterna.models.families import rope_settings
from sterna.models.family import Family, Settings, Shapes
from sterna.models.fields import Fields
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, RopeSpec, kv_groups

Activation = Literal["silu", "gelu", "gelu_tanh"]

_MAX_WIDTH, _MAX_INTERMEDIATE, _MAX_VOCAB = 1 << 17, 1 << 20, 1 << 23
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_WINDOW = 1024, 1024, 1024, 1 << 28

_HF_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_NOTHING: tuple[object, ...] = (False, 0, [], {})
_HF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": ({},),
    "compression_config": ({},),
    "pretraining_tp": (1,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    "attention_chunk_size": (0,),
    "attn_temperature_tuning": _NOTHING,
    "llama_4_scaling": _NOTHING,
    "no_rope_layers": _NOTHING,
    "use_qk_norm": _NOTHING,
    "qk_layernorm": _NOTHING,
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": _NOTHING,
    "alibi": (False,),
}
"""Settings that change arithmetic which the spec has no word for, and their values that change nothing."""

_GGUF_READ = re.compile(
    r"(vocab_size|context_length|embedding_length|block_count|feed_forward_length|"
    r"attention\.(head_count|head_count_kv|key_length|value_length|layer_norm_rms_epsilon|sliding_window)|"
    r"rope\.(dimension_count|freq_base|scale_linear|scaling\.\w+))"
)
_GGUF_HARMLESS = re.compile(r"pooling_type|tensor_data_layout|rope\.scaling\.finetuned|embedding_length_out")
_GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}

_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_HF_NAMES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

_GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_GGUF_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The numbers that every dense decoder has."""

    vocab_size: int
    hidden_size: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tied_head: bool


class DenseFamily(Family):
    """What the family files of dense decoders don't repeat: names, context length, and rows that lie canonically."""

    def context_len_from_hf(self, config: Settings) -> int:
        return rope_settings.context_len_from_hf(hf_fields(config))

    def context_len_from_gguf(self, metadata: Settings) -> int:
        return rope_settings.context_len_from_gguf(gguf_fields(metadata))

    def hf_name(self, canonical: str) -> str:
        return _stored_name(canonical, _HF_NAMES, _HF_LAYER_NAMES, "model.layers")

    def gguf_name(self, canonical: str) -> str:
        return _stored_name(canonical, _GGUF_NAMES, _GGUF_LAYER_NAMES, "blk")

    def gguf_permuted_heads(self, spec: ModelSpec, canonical: str) -> int | None:
        return None


def hf_fields(config: Settings) -> Fields:
    return Fields(config, "config.json")


def gguf_fields(metadata: Settings) -> Fields:
    arch = Fields(metadata, "GGUF metadata").text("general.architecture")
    return Fields(metadata, "GGUF metadata", prefix=f"{arch}.")


def hf_dimensions(fields: Fields, shapes: Shapes, *, kv_heads: int | None = None, head_dim: int | None = None) -> Dimensions:
    """Read a config.json, refusing what would change arithmetic unseen.

    `kv_heads`, `head_dim`: what the family takes where the config doesn't mention them; None: the number of heads, hidden / heads.
    """
    fields.refuse(_HF_NEUTRAL)
    activation = fields.text("hidden_act", "silu")
    if activation not in _HF_ACTIVATIONS:
        raise fields.fault("hidden_act", f"{activation!r} is not supported (supported: {', '.join(_HF_ACTIVATIONS)})")
    hidden = fields.integer("hidden_size", high=_MAX_WIDTH)
    heads = fields.integer("num_attention_heads", high=_MAX_HEADS)
    if kv_heads is None or fields.mentions("num_key_value_heads"):
        kv_heads = heads
    tied = "lm_head.weight" not in shapes
    # Where both say "tied" and there is a head, transformers uses the head, unless it equals the embedding: the same arithmetic.
    if tied and not fields.flag("tie_word_embeddings", True):
        raise fields.fault("tie_word_embeddings", "false, but there is no tensor lm_head.weight")
    return Dimensions(
        vocab_size=fields.integer("vocab_size", high=_MAX_VOCAB),
        hidden_size=hidden,
        intermediate=fields.integer("intermediate_size", high=_MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", high=_MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, "num_key_value_heads", heads, kv_heads),
        head_dim=_head_dim(fields, "head_dim", hidden, heads, head_dim),
        norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        activation=_HF_ACTIVATIONS[activation],
        tied_head=tied,
    )


def gguf_dimensions(fields: Fields, shapes: Shapes) -> Dimensions:
    """Read a GGUF's metadata; every setting under the architecture's prefix must be understood, or say nothing."""
    fields.refuse(_GGUF_NEUTRAL)
    for name in fields.names():
        known = _GGUF_READ.fullmatch(name) or _GGUF_HARMLESS.fullmatch(name) or name in _GGUF_NEUTRAL
        if not known and fields.get(name) not in _NOTHING:
            raise fields.fault(name, f"{fields.get(name)!r} is not supported")
    embed = shapes.get("token_embd.weight", ())
    if len(embed) != 2:
        raise fields.fault("vocab_size", "there is no matrix token_embd.weight to take it from")
    vocab = fields.integer("vocab_size", embed[0], high=_MAX_VOCAB)
    hidden = fields.integer("embedding_length", high=_MAX_WIDTH)
    heads = fields.integer("attention.head_count", high=_MAX_HEADS)
    head_dim = _head_dim(fields, "attention.key_length", hidden, heads, None)
    if fields.integer("attention.value_length", head_dim, high=_MAX_HEAD_DIM) != head_dim:
        raise fields.fault("attention.value_length", f"must equal the key length {head_dim}")
    return Dimensions(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate=fields.integer("feed_forward_length", high=_MAX_INTERMEDIATE),
        num_layers=fields.integer("block_count", high=_MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, "attention.head_count_kv", heads, heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        activation="silu",
        tied_head="output.weight" not in shapes,
    )


def dense_spec(
    dims: Dimensions,
    rope: RopeSpec,
    *,
    windows: Callable[[int], int | None] = lambda layer: None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["head", "projection"] | None = None,
) -> ModelSpec:
    """The spec of a dense decoder; `windows` gives each layer's sliding window."""
    mlp = GatedMLPSpec(dims.intermediate, dims.activation, mlp_bias)

    def layer(index: int) -> LayerSpec:
        mixer = AttentionSpec(
            num_heads=dims.num_heads,
            num_kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            scale=dims.head_dim**-0.5,
            rope=rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            window=windows(index),
        )
        return LayerSpec(mixer, mlp, dims.norm_eps)

    layers = tuple(layer(index) for index in range(dims.num_layers))
    return ModelSpec(
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=layers,
        kv_groups=kv_groups(layers),
        final_norm_eps=dims.norm_eps,
        tied_head=dims.tied_head,
    )


def read_window(fields: Fields, name: str, default: int | None, *, context_len: int) -> int | None:
    """A sliding window in tokens; None where the setting is null or 0, or where the context never outgrows it."""
    if fields.get(name) in (None, 0) and (default is None or fields.mentions(name)):
        return None
    window = fields.integer(name, default, high=_MAX_WINDOW)
    return window if window < context_len else None


def _stored_name(canonical: str, names: dict[str, str], layer_names: dict[str, str], layers: str) -> str:
    stem, suffix = (canonical[:-5], ".bias") if canonical.endswith(".bias") else (canonical, ".weight")
    if not stem.startswith("layers."):
        return names[stem] + suffix
    _, index, part = stem.split(".", 2)
    return f"{layers}.{index}.{layer_names[part]}{suffix}"


def _kv_heads(fields: Fields, name: str, heads: int, default: int) -> int:
    kv_heads = fields.integer(name, default, high=_MAX_HEADS)
    if heads % kv_heads:
        raise fields.fault(name, f"{kv_heads} does not divide the {heads} attention heads")
    return kv_heads


def _head_dim(fields: Fields, name: str, hidden: int, heads: int, default: int | None) -> int:
    if fields.get(name) is None and default is None and hidden % heads:
        raise fields.fault(name, f"missing, and {heads} heads don't divide a width of {hidden}")
    head_dim = fields.integer(name, default or hidden // heads, high=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.fault(name, f"must be even for rotary embedding, is {head_dim}")
    return head_dim
