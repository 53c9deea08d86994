"""The numbers that every decoder's settings give, from either format, and the settings which are refused because nothing here has a word
for what they change."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from sterna.models.family import Settings, Shapes
from sterna.models.fields import Fields

Activation = Literal["silu", "gelu", "gelu_tanh"]

_MAX_WIDTH, _MAX_INTERMEDIATE, _MAX_VOCAB = 1 << 17, 1 << 20, 1 << 23
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM = 1024, 1024, 1024

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


def hf_fields(config: Settings) -> Fields:
    return Fields(config, "config.json")


def gguf_fields(metadata: Settings) -> Fields:
    arch = Fields(metadata, "GGUF metadata").text("general.architecture")
    return Fields(metadata, "GGUF metadata", prefix=f"{arch}.")


def hf_dimensions(
    fields: Fields,
    shapes: Shapes,
    *,
    reads: Collection[str] = (),
    kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    activation_in: str = "hidden_act",
    activation: str = "silu",
) -> Dimensions:
    """Read a config.json, refusing what would change arithmetic unseen, unless it is among what the family `reads` itself.

    The others are what the family takes where the config doesn't mention it; None: the number of heads, hidden / heads.
    `activation_in`: the setting that names the activation.
    """
    fields.refuse({name: neutral for name, neutral in _HF_NEUTRAL.items() if name not in reads})
    activation = fields.text(activation_in, activation)
    if activation not in _HF_ACTIVATIONS:
        raise fields.fault(activation_in, f"{activation!r} is not supported (supported: {', '.join(_HF_ACTIVATIONS)})")
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
        norm_eps=fields.number("rms_norm_eps", norm_eps, low=0.0, high=1.0),
        activation=_HF_ACTIVATIONS[activation],
        tied_head=tied,
    )


def gguf_dimensions(fields: Fields, shapes: Shapes, *, reads: Collection[str] = (), activation: Activation = "silu") -> Dimensions:
    """Read a GGUF's metadata; every setting under the architecture's prefix must be understood, be among what the family `reads` itself,
    or say nothing. `activation`: the format has no setting for it."""
    fields.refuse({name: neutral for name, neutral in _GGUF_NEUTRAL.items() if name not in reads})
    for name in fields.names():
        known = _GGUF_READ.fullmatch(name) or _GGUF_HARMLESS.fullmatch(name) or name in _GGUF_NEUTRAL or name in reads
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
        activation=activation,
        tied_head="output.weight" not in shapes,
    )


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
