"""A tiny model's weights by canonical name, by rule and not by the product's tables."""

from __future__ import annotations

import re

import numpy as np

import tiny_models
from tiny_models import FloatArray

_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def canonical_weights(name: str) -> dict[str, FloatArray]:
    variant = tiny_models.VARIANTS[name]
    found: dict[str, FloatArray] = {}
    for tensor, values in tiny_models.weights(name).items():
        if variant.family in ("gemma2", "gemma3") and tensor.endswith("norm.weight"):
            values = np.float32(1.0) + values
        found |= _parts(variant, tensor.removesuffix(".weight").removeprefix("model."), values)
    return found


def _parts(variant: tiny_models.Variant, tensor: str, values: FloatArray) -> dict[str, FloatArray]:
    """What one stored tensor is: one weight, or several fused ones."""
    q = variant.config["num_attention_heads"] * variant.head_dim
    kv = variant.config["num_key_value_heads"] * variant.head_dim
    name = tensor.replace("self_attn", "attn").replace("block_sparse_moe", "mlp").replace("_proj", "")
    name = re.sub(r"\.(w[123])$", lambda match: f".{_EXPERT_PARTS[match[1]]}", name)
    if name.endswith(".qkv"):
        return {f"{name[:-3]}{part}": rows for part, rows in zip("qkv", np.split(values, [q, q + kv]), strict=True)}
    if name.endswith(".gate_up"):
        return {f"{name[:-7]}{part}": rows for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True)}
    if "experts" not in name:
        has_experts = variant.family in ("mixtral", "qwen3_moe")
        name = re.sub(r"\.mlp\.gate$", ".mlp.router", name) if has_experts and "_proj" not in tensor else name
    return {_norm_renamed(variant, {"embed_tokens": "embed", "norm": "final_norm", "lm_head": "head"}.get(name, name)): values}


def _norm_renamed(variant: tiny_models.Variant, name: str) -> str:
    """transformers' norms are named by where they stand, and `post_attention` stands in two places."""
    after = variant.family in ("gemma2", "gemma3", "olmo2")
    places = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_post_norm" if after else "mlp_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
    head, _, leaf = name.rpartition(".")
    return f"{head}.{places[leaf]}" if leaf in places else name
