"""Whatever a config or a GGUF's metadata says, a family gives a spec of bounded size or one ModelError: nothing else comes out."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.errors import ModelError
from sterna.models.registry import FAMILIES, family_of_gguf, family_of_hf
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import ModelSpec
from unit.models.settings import ARCHITECTURES, GGUF_NEEDS

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.sampled_from([1, 2, 4, 8, 64, 1024])
)
KINDS = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "none", "longrope"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2))
ROPE_NAMES = [
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "attention_factor",
    "rope_theta",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
]
ROPES = st.builds(lambda kind, rest: {"rope_type": kind, **rest}, KINDS | VALUES, st.dictionaries(st.sampled_from(ROPE_NAMES), VALUES))

HF_NAMES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("attention_bias", "mlp_bias", "rope_theta", "rope_parameters", "tie_word_embeddings", "pretraining_tp", "architectures"),
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("partial_rotary_factor", "original_max_position_embeddings", "no_rope_layers", "no_rope_layer_interval"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
]
GGUF_NAMES = [
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "expert_count"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    *("expert_used_count", "expert_feed_forward_length", "rope.scaling.attn_factor"),
    *("embedding_scale", "attention.scale", "residual_scale", "logit_scale"),
]
HF_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
GGUF_BASE: dict[str, Any] = {
    "block_count": 3,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def assert_usable(spec: ModelSpec) -> None:
    assert 1 <= len(spec.layers) <= 1024
    for rope in {layer.mixer.rope for layer in spec.layers} - {None}:
        inverse_frequencies(rope)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_config_gives_a_spec_or_a_model_error(name: str) -> None:
    outcomes: Counter[str] = Counter()

    @given(changes=st.dictionaries(st.sampled_from(HF_NAMES), VALUES, max_size=3), rope=st.none() | ROPES)
    def attempt(changes: dict[str, Any], rope: dict[str, Any] | None) -> None:
        config = {**HF_BASE, "model_type": FAMILIES[name].hf_model_type, "rope_scaling": rope, **changes}
        try:
            family = family_of_hf(config)
            context_len = family.context_len_from_hf(config)
            spec = family.spec_from_hf(config, {"lm_head.weight": (320, 64)}, context_len=context_len)
        except ModelError:
            outcomes["refused"] += 1
        else:
            assert_usable(spec)
            outcomes["read"] += 1

    attempt()
    assert outcomes["refused"]
    assert outcomes["read"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_metadata_gives_a_spec_or_a_model_error(arch: str) -> None:
    outcomes: Counter[str] = Counter()

    @given(changes=st.dictionaries(st.sampled_from(GGUF_NAMES), KINDS | VALUES, max_size=4))
    def attempt(changes: dict[str, Any]) -> None:
        metadata = {
            "general.architecture": arch,
            **{f"{arch}.{name}": value for name, value in {**GGUF_BASE, **GGUF_NEEDS.get(arch, {}), **changes}.items()},
        }
        try:
            family = family_of_gguf(metadata)
            context_len = family.context_len_from_gguf(metadata)
            spec = family.spec_from_gguf(metadata, {"token_embd.weight": (320, 64)}, context_len=context_len)
        except ModelError:
            outcomes["refused"] += 1
        else:
            assert_usable(spec)
            outcomes["read"] += 1

    attempt()
    assert outcomes["refused"]
    assert outcomes["read"]
