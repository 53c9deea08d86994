"""config.json -> ModelSpec: what each family reads, and that nothing which changes arithmetic passes unseen."""

from functools import partial
from typing import Any

import pytest

from sterna.errors import ModelError
from sterna.models.registry import FAMILIES, family_of_hf, load_family
from sterna.models.spec import ModelSpec, RopeDynamic, RopeLinear, RopeLlama3, RopeYarn
from unit.models.settings import ALL, EXPERTS, GEMMAS, NEEDS, RENAMED, UNDERSTOOD, UNTIED, config, spec, windows


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


@pytest.mark.parametrize("family", ALL)
def test_the_registry_finds_a_family_by_architecture_or_by_model_type(family: str) -> None:
    assert family_of_hf(config(family)).name == family
    assert family_of_hf(config(family, architectures=None)).name == family


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "Mamba2ForCausalLM"),
        ({"model_type": "mamba2", "architectures": None}, "mamba2"),
        ({"model_type": None, "architectures": None}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        family_of_hf(config("llama", **changes))


def test_the_refusal_of_an_architecture_lists_those_supported() -> None:
    with pytest.raises(ModelError) as refusal:
        family_of_hf({"model_type": "mamba2"})
    assert all(row.hf_architecture in refusal.value.message for row in FAMILIES.values())
    with pytest.raises(ModelError, match="llama, mistral, qwen2, qwen3"):
        load_family("mamba2")


@pytest.mark.parametrize("family", ALL)
def test_the_common_dimensions_are_read(family: str) -> None:
    made = spec(family, config(family, head_dim=32))
    assert (made.vocab_size, made.hidden_size, len(made.layers), made.tied_head) == (320, 64, 3, False)
    mixer, mlp = made.layers[2].mixer, made.layers[2].mlp
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale) == (4, 2, 32, pytest.approx(32**-0.5))
    intermediate = NEEDS.get(family, {}).get("moe_intermediate_size", 128)
    assert (mlp.intermediate, mlp.activation, made.layers[0].norm_eps, made.final_norm_eps) == (intermediate, "silu", 1e-5, 1e-5)
    assert made.kv_groups[0].layers == (0, 1, 2)
    assert made.kv_groups[0].elements_per_token == 3 * 2 * 2 * 32


def test_absent_settings_have_the_values_of_transformers_configs() -> None:
    transformers = pytest.importorskip("transformers")
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
    for family in ALL:
        needs = NEEDS.get(family, {})
        bare = without({**config(family), "num_attention_heads": 32, "hidden_size": 1024, "num_hidden_layers": 8}, *optional, *needs)
        theirs = transformers.AutoConfig.for_model(**bare)
        made = spec(family, bare, context_len=1 << 20)
        mixer = made.layers[0].mixer
        assert mixer.num_kv_heads == theirs.num_key_value_heads, family
        assert mixer.head_dim == (getattr(theirs, "head_dim", None) or 32), family
        assert made.final_norm_eps == theirs.rms_norm_eps, family
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if family == "mistral" else "full_attention"] * 8
        for kind, layer in zip(kinds, made.layers, strict=True):
            assert layer.mixer.window == (theirs.sliding_window if kind == "sliding_attention" else None), family
            assert (layer.mixer.rope is not None) == (family != "smollm3" or layer not in made.layers[3::4])
            if layer.mixer.rope is None:
                continue
            ropes = theirs.rope_parameters
            assert layer.mixer.rope.theta == (ropes.get(kind) or ropes)["rope_theta"], family
        if family in EXPERTS:
            mlp = made.layers[0].mlp
            assert (mlp.num_experts, mlp.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)
            assert mlp.intermediate == getattr(theirs, "moe_intermediate_size", 128)
            assert mlp.normalize == getattr(theirs, "norm_topk_prob", True)
        if family == "granite":
            assert (made.embed_scale, made.logit_scale, mixer.scale, made.layers[0].residual_scale) == (1.0, 1.0, 1.0, 1.0)
        if family in GEMMAS:
            assert mixer.scale == theirs.query_pre_attn_scalar**-0.5
            assert (mixer.softcap, made.logit_softcap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
            assert made.layers[0].mlp.activation == "gelu_tanh"


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [None, 0, -1, 10**12, 1.5, "64", True, [64], float("nan")])
def test_a_dimension_that_is_absent_or_out_of_bounds_is_refused_by_name(family: str, name: str, value: object) -> None:
    broken = config(family, **{name: value})
    read = load_family(family).context_len_from_hf if name == "max_position_embeddings" else partial(spec, family)
    with pytest.raises(ModelError, match=name):
        read(broken)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 15),
        ("head_dim", -2),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", 0),
        ("rope_theta", 1),
        ("hidden_act", "relu2"),
        ("hidden_act", 7),
        ("rope_scaling", "yarn"),
    ],
)
@pytest.mark.parametrize("family", ALL)
def test_a_value_that_makes_no_sense_is_refused_by_name(family: str, name: str, value: object) -> None:
    name = RENAMED.get((family, name), name)
    with pytest.raises(ModelError, match=name):
        spec(family, config(family, **{name: value}))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ModelError, match="head_dim"):
        spec("llama", config("llama", num_attention_heads=6))


CHANGING: list[tuple[str, object]] = [
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("pretraining_tp", 2),
    ("partial_rotary_factor", 0.5),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("logits_scaling", 8.0),
    ("attention_multiplier", 0.01),
    ("residual_multiplier", 0.2),
    ("query_pre_attn_scalar", 64),
    ("use_bidirectional_attention", True),
    ("num_local_experts", 8),
    ("no_rope_layers", [1, 1, 0]),
]


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [(family, name, value) for family in ALL for name, value in CHANGING if name not in UNDERSTOOD.get(family, ())],
)
def test_a_setting_that_changes_arithmetic_is_refused_by_name(family: str, name: str, value: object) -> None:
    with pytest.raises(ModelError, match=name):
        spec(family, config(family, **{name: value}))


@pytest.mark.parametrize("family", ALL)
def test_settings_at_values_that_change_nothing_are_accepted(family: str) -> None:
    neutral = {"pretraining_tp": 1, "quantization_config": None, "clip_qkv": None, "partial_rotary_factor": 1.0}
    assert spec(family, config(family, **neutral)) == spec(family, config(family))


@pytest.mark.parametrize(("named", "ours"), [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activations_go_by_their_meaning(named: str, ours: str) -> None:
    assert spec("llama", config("llama", hidden_act=named)).layers[0].mlp.activation == ours


def test_a_head_is_untied_exactly_where_there_is_one() -> None:
    llama = load_family("llama")
    tied = config("llama", tie_word_embeddings=True)
    assert llama.spec_from_hf(tied, {}, context_len=1024).tied_head
    # transformers uses a stored head that differs from the embedding, whatever the config says
    assert not llama.spec_from_hf(tied, UNTIED, context_len=1024).tied_head
    with pytest.raises(ModelError, match=r"tie_word_embeddings.*lm_head\.weight"):
        llama.spec_from_hf(config("llama", tie_word_embeddings=False), {}, context_len=1024)


def test_biases_are_where_each_family_has_them() -> None:
    def biases(family: str, **changes: object) -> tuple[bool, bool, bool]:
        layer = spec(family, config(family, **changes)).layers[0]
        return layer.mixer.qkv_bias, layer.mixer.o_bias, getattr(layer.mlp, "bias", False)

    assert biases("llama") == (False, False, False)
    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("llama", mlp_bias=True) == (False, False, True)
    assert biases("mistral") == (False, False, False)
    assert biases("qwen2") == (True, False, False)
    for family in ("qwen3", "qwen3_moe", "olmo2", "gemma2", "gemma3"):
        assert biases(family, attention_bias=True) == (True, True, False)
        with pytest.raises(ModelError, match="mlp_bias"):
            biases(family, mlp_bias=True)
    for family in ("granite", "smollm3"):
        assert biases(family, attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("qwen3") == (False, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)


def test_queries_and_keys_are_normalised_where_each_family_does() -> None:
    assert {family: spec(family, config(family)).layers[0].mixer.qk_norm for family in ALL} == {
        **dict.fromkeys(ALL, None),
        "qwen3": "head",
        "qwen3_moe": "head",
        "gemma3": "head",
        "olmo2": "projection",
    }


def test_norms_stand_where_each_family_has_them() -> None:
    def norms(family: str) -> tuple[bool, bool]:
        layer = spec(family, config(family)).layers[0]
        return layer.pre_norm, layer.post_norm

    assert {family: norms(family) for family in ALL} == {
        **dict.fromkeys(ALL, (True, False)),
        **dict.fromkeys(GEMMAS, (True, True)),
        "olmo2": (False, True),
    }


def test_mistrals_window_is_on_every_layer_and_null_is_none() -> None:
    assert windows("mistral", sliding_window=256) == [256] * 3
    assert windows("mistral", sliding_window=None) == [None] * 3
    assert windows("mistral", context_len=8192) == [4096] * 3


@pytest.mark.parametrize("context_len", [255, 256])
def test_a_window_that_the_context_never_outgrows_is_no_window(context_len: int) -> None:
    assert windows("mistral", sliding_window=256, context_len=context_len) == [None] * 3
    assert windows("mistral", sliding_window=256, context_len=257) == [256] * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_windows_follow_the_switch_and_the_layers(family: str) -> None:
    on: dict[str, object] = {"use_sliding_window": True, "sliding_window": 128}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(family, sliding_window=128, max_window_layers=0) == [None] * 3
    assert windows(family, **on, max_window_layers=1) == [None, 128, 128]
    assert windows(family, **on, max_window_layers=3) == [None] * 3
    assert windows(family, **on, layer_types=kinds, max_window_layers=3) == [128, None, 128]
    with pytest.raises(ModelError, match="layer_types"):
        windows(family, layer_types=kinds)
    with pytest.raises(ModelError, match="layer_types"):
        windows(family, **on, layer_types=kinds[:2])
    with pytest.raises(ModelError, match="layer_types"):
        windows(family, **on, layer_types=["chunked_attention"] * 3)
    with pytest.raises(ModelError, match="sliding_window"):
        windows(family, use_sliding_window=True, sliding_window=-1)


def test_a_window_where_the_family_has_none_is_refused() -> None:
    for family in ("llama", "olmo2", "granite"):
        with pytest.raises(ModelError, match="sliding_window"):
            windows(family, sliding_window=128)
    for family in ("mistral", "mixtral", "qwen3_moe", "phi3", "olmo2", "granite"):
        with pytest.raises(ModelError, match="layer_types"):
            windows(family, layer_types=["full_attention"] * 3)


def test_granites_multipliers_are_read() -> None:
    multipliers = {"embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8}
    made = spec("granite", config("granite", **multipliers))
    assert (made.embed_scale, made.logit_scale) == (12.0, 0.125)
    assert {(layer.mixer.scale, layer.residual_scale) for layer in made.layers} == {(0.015625, 0.22)}
    for name in multipliers:
        for wrong in (0, -1, "1", float("nan")):
            with pytest.raises(ModelError, match=name):
                spec("granite", config("granite", **{**multipliers, name: wrong}))


def test_smollm3s_layers_without_rope_are_every_fourth_or_those_listed() -> None:
    def turning(**changes: object) -> list[bool]:
        return [layer.mixer.rope is not None for layer in spec("smollm3", config("smollm3", num_hidden_layers=5, **changes)).layers]

    assert turning() == [True, True, True, False, True]
    assert turning(no_rope_layer_interval=2) == [True, False, True, False, True]
    # The list has a 1 where there is rope, and may be longer than the model.
    assert turning(no_rope_layers=[0, 1, 1, 0, 1, 0], no_rope_layer_interval=2) == [False, True, True, False, True]
    for name, wrong in (
        ("no_rope_layers", [1, 1, 1]),
        ("no_rope_layers", [2] * 5),
        ("no_rope_layers", "01010"),
        ("no_rope_layer_interval", 0),
    ):
        with pytest.raises(ModelError, match=name):
            turning(**{name: wrong})


def test_smollm3s_windows_are_where_there_is_no_rope_or_where_listed() -> None:
    on: dict[str, object] = {"use_sliding_window": True, "sliding_window": 128, "no_rope_layers": [1, 0, 1]}
    assert windows("smollm3", **on) == [None, 128, None]
    assert windows("smollm3", **on, layer_types=["sliding_attention", "full_attention", "full_attention"]) == [128, None, None]
    assert windows("smollm3", sliding_window=128) == [None] * 3
    with pytest.raises(ModelError, match="layer_types"):
        windows("smollm3", sliding_window=128, layer_types=["sliding_attention", "full_attention", "full_attention"])


def scaling(settings: dict[str, object], *, context_len: int = 1024, **changes: object) -> Any:
    old = spec("llama", config("llama", rope_scaling=settings, rope_theta=5e5, **changes), context_len=context_len)
    new = spec("llama", config("llama", rope_parameters={**settings, "rope_theta": 5e5}, **changes), context_len=context_len)
    assert old == new  # transformers 4's layout and 5's
    rope = new.layers[0].mixer.rope
    assert rope is not None
    assert (rope.theta, rope.dim) == (5e5, 16)
    return rope.scaling


def test_every_kind_of_rope_scaling_is_read_from_both_layouts() -> None:
    assert scaling({"rope_type": "default"}) is None
    assert scaling({"type": "linear", "factor": 2}) == RopeLinear(2.0)
    assert scaling({"rope_type": "dynamic", "factor": 2.0}, context_len=2048) == RopeDynamic(2.0, 1024, 2048)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert scaling({**llama3, "original_max_position_embeddings": 512}) == RopeLlama3(8.0, 1.0, 4.0, 512)
    assert scaling(llama3) == RopeLlama3(8.0, 1.0, 4.0, 1024)
    assert scaling(llama3, original_max_position_embeddings=256) == RopeLlama3(8.0, 1.0, 4.0, 256)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert scaling(yarn) == RopeYarn(4.0, 256)
    more = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 0.5, "mscale": 1, "mscale_all_dim": 0.5, "truncate": False}
    assert scaling({**yarn, **more}) == RopeYarn(4.0, 256, 16.0, 2.0, 0.5, 1.0, 0.5, False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "su"}, "su"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}, "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1}, "attention_factor"),
        ({"rope_type": ["yarn"]}, "rope_type"),
    ],
)
def test_a_rope_setting_that_is_unknown_or_senseless_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        scaling(settings)


def test_yarn_stretches_the_context_and_the_other_kinds_leave_it() -> None:
    llama = load_family("llama")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert llama.context_len_from_hf(config("llama")) == 1024
    assert llama.context_len_from_hf(config("llama", rope_scaling=yarn)) == 2048
    assert llama.context_len_from_hf(config("llama", rope_scaling={**yarn, "factor": 2.0})) == 1024
    assert llama.context_len_from_hf(config("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0})) == 1024


def test_a_spec_survives_being_saved() -> None:
    import msgspec

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for family in ALL:
        made = spec(family, config(family, rope_scaling=long if family == "phi3" else yarn))
        assert made.layers[2].mixer.rope.scaling is not None or family == "gemma3"
        assert msgspec.json.decode(msgspec.json.encode(made), type=ModelSpec) == made
