"""Settings of every family in both formats, and what families make of them."""

from __future__ import annotations

from typing import Any

from sterna.models.registry import FAMILIES, load_family
from sterna.models.spec import ModelSpec

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
UNTIED = {"lm_head.weight": (320, 64)}
ALL = sorted(FAMILIES)
GEMMAS, EXPERTS = ("gemma2", "gemma3"), ("mixtral", "qwen3_moe")
NEEDS: dict[str, dict[str, Any]] = {gemma: {"hidden_activation": "silu", "query_pre_attn_scalar": 32} for gemma in GEMMAS}
NEEDS |= {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "granite": {"attention_multiplier": 32**-0.5},
}
"""What a family's config says beyond `BASE`, for its spec to be like the others'."""
RENAMED = {(family, "hidden_act"): "hidden_activation" for family in GEMMAS}
UNDERSTOOD = {
    "gemma2": {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"},
    "gemma3": {"query_pre_attn_scalar", "final_logit_softcapping"},
    "mixtral": {"num_local_experts"},
    "qwen3_moe": {"num_local_experts"},
    "phi3": {"partial_rotary_factor"},
    "granite": {"logits_scaling", "attention_multiplier", "residual_multiplier"},
    "smollm3": {"no_rope_layers", "pretraining_tp"},
}
"""Settings that one family has words for, and the others refuse."""


def config(family: str, **changes: object) -> dict[str, Any]:
    row = FAMILIES[family]
    return {**BASE, "model_type": row.hf_model_type, "architectures": [row.hf_architecture], **NEEDS.get(family, {}), **changes}


def spec(family: str, settings: dict[str, Any], *, context_len: int = 1024) -> ModelSpec:
    return load_family(family).spec_from_hf(settings, UNTIED, context_len=context_len)


def windows(family: str, *, context_len: int = 1024, **changes: object) -> list[int | None]:
    made = spec(family, config(family, **changes), context_len=context_len)
    return [layer.mixer.window for layer in made.layers]


SHAPES = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}
ARCHITECTURES = sorted({row.gguf_architecture for row in FAMILIES.values() if row.gguf_architecture})
GGUF_NEEDS: dict[str, dict[str, object]] = {"qwen3moe": {"expert_count": 4, "expert_used_count": 2}, "granite": {"logit_scale": 1.0}}
"""What an architecture needs beyond what all do."""
GGUF_UNDERSTOOD = {
    "llama": {"expert_count"},
    "gemma2": {"attn_logit_softcapping"},
    "qwen3moe": {"expert_count"},
    "phi3": {"rope__scaling__type", "rope__dimension_count"},
    "granite": {"logit_scale", "attention__scale"},
}
"""Settings that one architecture has words for, and the others refuse."""


def metadata(arch: str, **changes: object) -> dict[str, Any]:
    """`changes` by the name after the architecture; dots written as double underscores."""
    base: dict[str, Any] = {
        "block_count": 3,
        "context_length": 1024,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e5,
        **GGUF_NEEDS.get(arch, {}),
    }
    base.update({name.replace("__", "."): value for name, value in changes.items()})
    named = {f"{arch}.{name}": value for name, value in base.items() if value is not None}
    return {"general.architecture": arch, "general.name": "tiny", "tokenizer.ggml.model": "gpt2", **named}


FAMILY_OF = {row.gguf_architecture: family for family, row in FAMILIES.items()}


def gguf_spec(arch: str, settings: dict[str, Any], *, context_len: int = 1024, **more: object) -> ModelSpec:
    shapes = more.pop("shapes", SHAPES)
    return load_family(FAMILY_OF[arch]).spec_from_gguf(settings, shapes, context_len=context_len, **more)  # type: ignore[arg-type]
