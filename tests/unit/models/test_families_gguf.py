"""GGUF metadata -> ModelSpec, as llama.cpp reads it."""

from typing import Any

import pytest

from sterna.errors import ModelError
from sterna.models.registry import family_of_gguf, load_family
from sterna.models.spec import RopeFactors, RopeLinear, RopeYarn
from unit.models.settings import ARCHITECTURES, FAMILY_OF, GEMMAS, GGUF_UNDERSTOOD, SHAPES, gguf_spec, metadata


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_registry_finds_a_family_by_architecture(arch: str) -> None:
    assert family_of_gguf(metadata(arch)).name == FAMILY_OF[arch]


@pytest.mark.parametrize("arch", ["mamba2", "mistral", None, 7])
def test_an_unsupported_architecture_is_refused_by_name_with_those_supported(arch: object) -> None:
    with pytest.raises(ModelError, match=rf"{arch!r}.*llama, qwen2, qwen3, qwen3moe"):
        family_of_gguf({"general.architecture": arch})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_common_dimensions_are_read(arch: str) -> None:
    made = gguf_spec(arch, metadata(arch, attention__key_length=32, attention__value_length=32, rope__dimension_count=32))
    assert (made.vocab_size, made.hidden_size, len(made.layers), made.tied_head) == (320, 64, 3, False)
    mixer = made.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (4, 2, 32)
    assert mixer.rope is not None
    assert (mixer.rope.theta, mixer.rope.dim, mixer.rope.scaling) == (5e5, 32, None)
    assert made.layers[0].mlp.activation == ("gelu_tanh" if arch in GEMMAS else "silu")
    assert made.final_norm_eps == 1e-5
    assert mixer.qk_norm == {"qwen3": "head", "qwen3moe": "head", "gemma3": "head", "olmo2": "projection"}.get(arch)
    assert load_family(FAMILY_OF[arch]).context_len_from_gguf(metadata(arch)) == 1024


def test_absent_settings_have_llama_cpps_values() -> None:
    made = gguf_spec("llama", metadata("llama", attention__head_count_kv=None, rope__freq_base=None))
    mixer = made.layers[0].mixer
    assert mixer.rope is not None
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.rope.theta) == (4, 16, 10_000.0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("value", [None, 0, -1, 1 << 40, 2.5, "64", [64, 64, 64]])
@pytest.mark.parametrize("name", ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention__head_count"])
def test_a_dimension_that_is_absent_or_out_of_bounds_is_refused_by_name(arch: str, name: str, value: object) -> None:
    broken = metadata(arch, **{name: value})
    family = load_family(FAMILY_OF[arch])
    with pytest.raises(ModelError, match=name.replace("__", ".")):
        family.context_len_from_gguf(broken) if name == "context_length" else gguf_spec(arch, broken)


CHANGING: list[tuple[str, object]] = [
    ("expert_count", 8),
    ("attention__causal", False),
    ("attention__scale", 0.1),
    ("attention__clamp_kqv", 8.0),
    ("attention__value_length", 8),
    ("attn_logit_softcapping", 50.0),
    ("logit_scale", 0.5),
    ("rope__dimension_count", 8),
    ("rope__scaling__type", "longrope"),
    ("rope__scaling__factor", 0.5),
    ("rope__scaling__attn_factor", 1.2),
    ("rope__scaling__yarn_log_multiplier", 0.1),
    ("rope__freq_base", 0.0),
    ("a_setting_of_tomorrow", 3),
]


@pytest.mark.parametrize(
    ("arch", "name", "value"),
    [(arch, name, value) for arch in ARCHITECTURES for name, value in CHANGING if name not in GGUF_UNDERSTOOD.get(arch, ())],
)
def test_a_setting_that_would_change_arithmetic_is_refused_by_name(arch: str, name: str, value: object) -> None:
    with pytest.raises(ModelError, match=name.replace("__", ".")):
        gguf_spec(arch, metadata(arch, **{name: value}))


def test_settings_that_say_nothing_are_accepted() -> None:
    neutral = {"expert_count": 0, "attention__causal": True, "logit_scale": 1.0, "rope__scaling__finetuned": True, "vocab_size": 320}
    assert gguf_spec("llama", metadata("llama", **neutral)) == gguf_spec("llama", metadata("llama"))


def test_biases_and_the_head_are_where_llamas_tensors_are() -> None:
    extra = {"blk.0.attn_q.bias": (64,), "blk.0.attn_output.bias": (64,), "blk.0.ffn_gate.bias": (128,)}
    for arch in ("llama", "granite", "smollm3"):
        plain = gguf_spec(arch, metadata(arch), shapes={"token_embd.weight": (320, 64)})
        assert plain.tied_head
        assert not plain.layers[0].mixer.qkv_bias
        biased = gguf_spec(arch, metadata(arch), shapes={**SHAPES, **extra}).layers[0]
        assert (biased.mixer.qkv_bias, biased.mixer.o_bias, biased.mlp.bias) == (True, True, True)
    assert gguf_spec("qwen2", metadata("qwen2")).layers[0].mixer.qkv_bias


def test_a_file_without_an_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        gguf_spec("llama", metadata("llama"), shapes={})


def scaling(**changes: object) -> Any:
    rope = gguf_spec("llama", metadata("llama", **changes)).layers[0].mixer.rope
    assert rope is not None
    return rope.scaling


def test_rope_scaling_is_read_as_llama_cpp_reads_it() -> None:
    assert scaling(rope__scaling__type="none", rope__scaling__factor=4.0) is None
    assert scaling(rope__scaling__type="linear", rope__scaling__factor=4.0) == RopeLinear(4.0)
    assert scaling(rope__scaling__factor=4.0) == RopeLinear(4.0)
    assert scaling(rope__scale_linear=2.0) == RopeLinear(2.0)
    assert scaling(rope__scaling__type="linear", rope__scaling__factor=0.0) is None
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert scaling(**yarn, rope__scaling__original_context_length=256) == RopeYarn(4.0, 256)
    assert scaling(**yarn, rope__scaling__yarn_beta_fast=16.0) == RopeYarn(4.0, 1024, beta_fast=16.0)
    assert load_family("llama").context_len_from_gguf(metadata("llama", **yarn)) == 4096


def test_rope_factors_are_taken_from_the_tensor() -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    shapes = {**SHAPES, "rope_freqs.weight": (8,)}

    def read(**changes: object) -> Any:
        rope = (
            gguf_spec("llama", metadata("llama", **changes), shapes=shapes, rope_tensors={"rope_freqs.weight": factors})
            .layers[0]
            .mixer.rope
        )
        assert rope is not None
        return rope.scaling

    assert read() == RopeFactors(tuple(factors))
    assert read(rope__scaling__factor=2.0) == RopeFactors(tuple(2 * factor for factor in factors))
    with pytest.raises(ModelError, match="yarn"):
        read(rope__scaling__type="yarn", rope__scaling__factor=2.0)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        gguf_spec("llama", metadata("llama"), shapes=shapes)
    with pytest.raises(ModelError, match="7 factors for 8 pairs"):
        gguf_spec("llama", metadata("llama"), shapes=shapes, rope_tensors={"rope_freqs.weight": factors[1:]})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        gguf_spec("llama", metadata("llama"), shapes=shapes, rope_tensors={"rope_freqs.weight": [0.0, *factors[1:]]})


def test_a_window_is_on_every_layer_of_llama_and_refused_elsewhere() -> None:
    made = gguf_spec("llama", metadata("llama", attention__sliding_window=128))
    assert [layer.mixer.window for layer in made.layers] == [128] * 3
    assert gguf_spec("llama", metadata("llama", attention__sliding_window=1024)).layers[0].mixer.window is None
    for arch in ("qwen2", "qwen3", "qwen3moe", "olmo2", "granite", "smollm3"):
        with pytest.raises(ModelError, match=r"attention\.sliding_window"):
            gguf_spec(arch, metadata(arch, attention__sliding_window=128))


@pytest.mark.parametrize("arch", sorted(set(ARCHITECTURES) - {"phi3"}))
def test_long_factors_are_refused_where_they_would_not_be_used(arch: str) -> None:
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight"):
        gguf_spec(arch, metadata(arch), shapes={**SHAPES, "rope_factors_long.weight": (8,)})


def test_norms_stand_where_each_architecture_has_them() -> None:
    def norms(arch: str) -> tuple[bool, bool]:
        layer = gguf_spec(arch, metadata(arch)).layers[0]
        return layer.pre_norm, layer.post_norm

    assert {arch: norms(arch) for arch in ARCHITECTURES} == {
        **dict.fromkeys(ARCHITECTURES, (True, False)),
        **dict.fromkeys(GEMMAS, (True, True)),
        "olmo2": (False, True),
    }


def test_granites_multipliers_are_read_and_0_stands_for_none() -> None:
    def multipliers(**changes: object) -> tuple[float, float, float, float]:
        made = gguf_spec("granite", metadata("granite", **changes))
        return made.embed_scale, made.layers[1].mixer.scale, made.layers[1].residual_scale, made.logit_scale

    given = {"embedding_scale": 12.0, "attention__scale": 0.015625, "residual_scale": 0.22, "logit_scale": 8.0}
    assert multipliers(**given) == (12.0, 0.015625, 0.22, 0.125)
    assert multipliers(logit_scale=8.0) == (1.0, 0.25, 1.0, 0.125)
    assert multipliers(**{**dict.fromkeys(given, 0.0), "logit_scale": 8.0}) == (1.0, 0.25, 1.0, 0.125)
    for wrong, named in (
        ({"logit_scale": None}, "logit_scale"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"residual_scale": -1.0}, "residual_scale"),
        ({"rope__scaling__finetuned": False}, r"rope\.scaling\.finetuned"),
    ):
        with pytest.raises(ModelError, match=named):
            multipliers(**wrong)


def test_every_fourth_layer_of_smollm3_is_without_rope() -> None:
    layers = gguf_spec("smollm3", metadata("smollm3", block_count=9)).layers
    assert [layer.mixer.rope is None for layer in layers] == [False, False, False, True] * 2 + [False]
