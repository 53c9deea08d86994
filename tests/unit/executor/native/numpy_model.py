"""A `ModelSpec` in float64 and the plainest way: every token attends over a full matrix of scores. The oracle of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sterna.models.rope import inverse_frequencies
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, MoESpec

Array = NDArray[Any]
Read = Callable[[str], Array]


def logits(spec: ModelSpec, read: Read, tokens: list[int]) -> Array:
    """(T, vocab): logits after each of `tokens`, with weights from `read(canonical name)`."""
    x = read("embed")[tokens].astype(np.float64) * spec.embed_scale
    for i, layer in enumerate(spec.layers):
        at = f"layers.{i}"

        def normed(values: Array, name: str, wanted: bool, eps: float = layer.norm_eps, at: str = at) -> Array:
            return _norm(values, read(f"{at}.{name}"), eps) if wanted else values

        mixed = _attention(layer, read, f"{at}.attn", normed(x, "attn_norm", layer.pre_norm))
        x = x + layer.residual_scale * normed(mixed, "attn_post_norm", layer.post_norm)
        out = _mlp(layer.mlp, read, f"{at}.mlp", normed(x, "mlp_norm", layer.pre_norm))
        x = x + layer.residual_scale * normed(out, "mlp_post_norm", layer.post_norm)
    x = _norm(x, read("final_norm"), spec.final_norm_eps)
    out = x @ read("embed" if spec.tied_head else "head").T
    if spec.head_bias:
        out = out + read("head.bias")
    return _softcap(out * spec.logit_scale, spec.logit_softcap)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _softcap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def _linear(read: Read, name: str, bias: bool, x: Array) -> Array:
    y = x @ read(name).T
    return y + read(f"{name}.bias") if bias else y


def _attention(layer: LayerSpec, read: Read, at: str, x: Array) -> Array:
    spec: AttentionSpec = layer.mixer
    q, k, v = (_linear(read, f"{at}.{part}", spec.qkv_bias, x) for part in "qkv")
    if spec.qk_norm == "projection":
        q, k = _norm(q, read(f"{at}.q_norm"), layer.norm_eps), _norm(k, read(f"{at}.k_norm"), layer.norm_eps)
    q, k, v = (part.reshape(len(x), -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = _norm(q, read(f"{at}.q_norm"), layer.norm_eps), _norm(k, read(f"{at}.k_norm"), layer.norm_eps)
    if spec.rope is not None:
        frequencies, scale = inverse_frequencies(spec.rope)
        angles = np.arange(len(x))[:, None, None] * frequencies
        q, k = (_rotate(part, angles, scale) for part in (q, k))
    group = spec.num_heads // spec.num_kv_heads
    k, v = (np.repeat(part, group, axis=1) for part in (k, v))
    scores = _softcap(np.einsum("qhd,khd->hqk", q, k) * spec.scale, spec.softcap)
    behind = np.arange(len(x))[:, None] - np.arange(len(x))
    hidden = (behind < 0) | (behind >= (spec.window or len(x)))
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return _linear(read, f"{at}.o", spec.o_bias, mixed)


def _rotate(x: Array, angles: Array, scale: float) -> Array:
    half = angles.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _mlp(spec: GatedMLPSpec | MoESpec, read: Read, at: str, x: Array) -> Array:
    if isinstance(spec, GatedMLPSpec):
        return _gated(spec.activation, read, at, spec.bias, x)
    scores = x @ read(f"{at}.router").T
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for t, row in enumerate(chances):
        chosen = np.argsort(-row, kind="stable")[: spec.top_k]
        total = row[chosen].sum() if spec.normalize else 1.0
        for e in chosen:
            out[t] += row[e] / total * _gated(spec.activation, read, f"{at}.experts.{e}", False, x[t : t + 1])[0]
    return out


def _gated(activation: str, read: Read, at: str, bias: bool, x: Array) -> Array:
    gate, up = _linear(read, f"{at}.gate", bias, x), _linear(read, f"{at}.up", bias, x)
    return _linear(read, f"{at}.down", bias, _activate(activation, gate) * up)


def _activate(activation: str, x: Array) -> Array:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))
