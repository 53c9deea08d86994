"""What the engine is told of a model: the spec's words in the dictionaries that `csrc/bindings/model_reader.cpp` reads."""

from __future__ import annotations

from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

import sterna.executor.native._native as _native
from sterna.executor.native.packed_file import PackedHeader
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec

Entries = dict[str, Any]
"""Read by C++, which checks every entry's type and shape."""


class Weights(Protocol):
    """What `packed_file.py: PackedModel` offers, by canonical names."""

    @property
    def header(self) -> PackedHeader: ...
    def matrix_bytes(self, name: str) -> NDArray[np.uint8]: ...
    def vector(self, name: str) -> NDArray[np.float32]: ...


def engine_config(spec: ModelSpec, weights: Weights) -> Entries:
    """All of `spec`, its weights in place. Raises KeyError for a weight that isn't there."""
    ropes = list(dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None))
    groups = {layer: g for g, group in enumerate(spec.kv_groups) for layer in group.layers}
    embed = _matrix(weights, "embed")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "kv_groups": len(spec.kv_groups),
        "embed_scale": spec.embed_scale,
        "logit_scale": spec.logit_scale,
        "logit_softcap": spec.logit_softcap,
        "final_norm_eps": spec.final_norm_eps,
        "embed": embed,
        "head": embed if spec.tied_head else _matrix(weights, "head"),
        "head.bias": weights.vector("head.bias") if spec.head_bias and not spec.tied_head else None,
        "final_norm": weights.vector("final_norm"),
        "ropes": [_rope(rope) for rope in ropes],
        "layers": [_layer(spec.layers[i], f"layers.{i}", ropes, groups[i], weights) for i in range(len(spec.layers))],
    }


def _rope(rope: RopeSpec) -> tuple[NDArray[np.float32], float]:
    frequencies, scale = inverse_frequencies(rope)
    return frequencies.astype(np.float32), scale


def _layer(layer: LayerSpec, at: str, ropes: list[RopeSpec], group: int, weights: Weights) -> Entries:
    return {
        "norm_eps": layer.norm_eps,
        "residual_scale": layer.residual_scale,
        "attn_norm": weights.vector(f"{at}.attn_norm") if layer.pre_norm else None,
        "attn_post_norm": weights.vector(f"{at}.attn_post_norm") if layer.post_norm else None,
        "mlp_norm": weights.vector(f"{at}.mlp_norm") if layer.pre_norm else None,
        "mlp_post_norm": weights.vector(f"{at}.mlp_post_norm") if layer.post_norm else None,
        "attn": _attention(layer.mixer, f"{at}.attn", ropes, group, weights),
        "mlp": _mlp(layer.mlp, f"{at}.mlp", weights),
    }


def _attention(mixer: AttentionSpec, at: str, ropes: list[RopeSpec], group: int, weights: Weights) -> Entries:
    normed = mixer.qk_norm is not None
    return {
        "heads": mixer.num_heads,
        "kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "scale": mixer.scale,
        "softcap": mixer.softcap,
        "window": mixer.window,
        "rope": None if mixer.rope is None else ropes.index(mixer.rope),
        "kv_group": group,
        **_linear(weights, at, "q", mixer.qkv_bias),
        **_linear(weights, at, "k", mixer.qkv_bias),
        **_linear(weights, at, "v", mixer.qkv_bias),
        **_linear(weights, at, "o", mixer.o_bias),
        "qk_norm": mixer.qk_norm,
        "q_norm": weights.vector(f"{at}.q_norm") if normed else None,
        "k_norm": weights.vector(f"{at}.k_norm") if normed else None,
    }


def _mlp(mlp: GatedMLPSpec | MoESpec, at: str, weights: Weights) -> Entries:
    match mlp:
        case GatedMLPSpec():
            return _gated(mlp.intermediate, mlp.activation, at, weights, mlp.bias)
        case MoESpec():
            return {
                "top_k": mlp.top_k,
                "normalize": mlp.normalize,
                "router": _matrix(weights, f"{at}.router"),
                "experts": [_gated(mlp.intermediate, mlp.activation, f"{at}.experts.{e}", weights, False) for e in range(mlp.num_experts)],
            }
        case _:
            assert_never(mlp)


def _gated(intermediate: int, activation: str, at: str, weights: Weights, bias: bool) -> Entries:
    return {
        "intermediate": intermediate,
        "activation": activation,
        **_linear(weights, at, "gate", bias),
        **_linear(weights, at, "up", bias),
        **_linear(weights, at, "down", bias),
    }


def _matrix(weights: Weights, name: str) -> _native.Matrix:
    record = weights.header.matrices[name]
    return _native.Matrix(
        quant=record.quant,
        has_min=record.has_min,
        float32_scales=record.float32_scales,
        scale_group=record.scale_group,
        rows=record.rows,
        cols=record.cols,
        data=weights.matrix_bytes(name),
    )


def _linear(weights: Weights, at: str, name: str, bias: bool) -> Entries:
    return {name: _matrix(weights, f"{at}.{name}"), f"{name}.bias": weights.vector(f"{at}.{name}.bias") if bias else None}
