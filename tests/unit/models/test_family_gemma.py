"""Gemma 2 and 3: windows, ropes, scales and caps."""

from __future__ import annotations

import pytest

from sterna.errors import ModelError
from sterna.models.registry import load_family
from sterna.models.spec import RopeLinear, RopeSpec
from unit.models.settings import GEMMAS, config, gguf_spec, metadata, spec, windows


def test_gemmas_windows_alternate_or_follow_the_layers() -> None:
    wide = {"sliding_window": 128, "num_hidden_layers": 7}
    assert windows("gemma2", **wide) == [128, None, 128, None, 128, None, 128]
    assert windows("gemma3", **wide) == [128] * 5 + [None, 128]
    assert windows("gemma3", **wide, sliding_window_pattern=3) == [128, 128, None, 128, 128, None, 128]
    for family in GEMMAS:
        assert windows(family, sliding_window=128, layer_types=["full_attention", *["sliding_attention"] * 2]) == [None, 128, 128]
        assert windows(family, **{**wide, "sliding_window": None}) == [None] * 7
        with pytest.raises(ModelError, match="layer_types"):
            windows(family, layer_types=["full_attention"])
        with pytest.raises(ModelError, match="sliding_window"):
            windows(family, sliding_window=-1)


def test_gemma_scales_embeddings_and_scores_and_caps_scores_and_logits() -> None:
    made = spec("gemma2", config("gemma2", query_pre_attn_scalar=100, attn_logit_softcapping=40, final_logit_softcapping=20))
    assert (made.embed_scale, made.logit_softcap) == (8.0, 20.0)
    assert (made.layers[0].mixer.scale, made.layers[0].mixer.softcap) == (pytest.approx(0.1), 40.0)
    free = spec("gemma2", config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (free.layers[0].mixer.softcap, free.logit_softcap) == (None, None)
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        with pytest.raises(ModelError, match=name):
            spec("gemma2", config("gemma2", **{name: 0}))


def test_gemma_3_has_a_rope_for_each_kind_of_layer_in_either_layout() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    linear = {"rope_type": "linear", "factor": 8.0}
    old = config("gemma3", layer_types=kinds, rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=linear)
    full, local = {**linear, "rope_theta": 2e6}, {"rope_type": "default", "rope_theta": 3e4}
    new = config("gemma3", layer_types=kinds, rope_parameters={"full_attention": full, "sliding_attention": local})
    for settings in (old, new):
        ropes = [layer.mixer.rope for layer in spec("gemma3", settings).layers]
        assert ropes == [RopeSpec(3e4, 256), RopeSpec(2e6, 256, RopeLinear(8.0)), RopeSpec(3e4, 256)]
        assert load_family("gemma3").context_len_from_hf(settings) == 1024
    for wrong, named in (
        ({"full_attention": {"rope_type": "longrope"}}, r"rope_parameters\.full_attention\.rope_type"),
        ({"sliding_attention": {"rope_theta": 1}}, r"rope_parameters\.sliding_attention\.rope_theta"),
        ({"rope_theta": 1e4}, r"rope_parameters\.rope_theta"),
    ):
        with pytest.raises(ModelError, match=named):
            spec("gemma3", config("gemma3", rope_parameters=wrong))
    with pytest.raises(ModelError, match="rope_scaling"):
        spec("gemma3", {**new, "rope_scaling": linear})
    with pytest.raises(ModelError, match="rope_local_base_freq"):
        spec("gemma3", config("gemma3", rope_local_base_freq=1))


def test_gemmas_windows_and_ropes_are_those_of_llama_cpp() -> None:
    def gguf_windows(arch: str, **changes: object) -> list[int | None]:
        return [layer.mixer.window for layer in gguf_spec(arch, metadata(arch, block_count=7, **changes), context_len=8192).layers]

    assert gguf_windows("gemma2") == [4096, None, 4096, None, 4096, None, 4096]
    assert gguf_windows("gemma3", attention__sliding_window=512) == [512] * 5 + [None, 512]
    assert gguf_windows("gemma3") == [None] * 7
    for arch in GEMMAS:
        wide = {"attention__sliding_window": 512}
        assert gguf_windows(arch, **wide, attention__sliding_window_pattern=3) == [512, 512, None, 512, 512, None, 512]
        assert gguf_windows(arch, **wide, attention__sliding_window_pattern=[False] * 6 + [True]) == [None] * 6 + [512]
        for wrong in ([True], [1] * 7, 0, -2, "6"):
            with pytest.raises(ModelError, match=r"sliding_window_pattern"):
                gguf_windows(arch, **wide, attention__sliding_window_pattern=wrong)

    def ropes(arch: str, **changes: object) -> list[RopeSpec | None]:
        made = gguf_spec(arch, metadata(arch, rope__scaling__factor=4.0, attention__sliding_window=512, **changes))
        return [layer.mixer.rope for layer in made.layers[:2]]

    full = RopeSpec(5e5, 16, RopeLinear(4.0))
    assert ropes("gemma2") == [full, full]
    assert ropes("gemma3", attention__sliding_window_pattern=2) == [RopeSpec(1e4, 16), full]
    assert ropes("gemma3", attention__sliding_window_pattern=2, rope__freq_base_swa=3e4) == [RopeSpec(3e4, 16), full]


def test_gemmas_scales_and_caps_are_those_of_llama_cpp() -> None:
    def scale(arch: str, layers: int) -> float:
        settings = metadata(arch, block_count=layers, attention__key_length=32, attention__value_length=32)
        return gguf_spec(arch, settings).layers[0].mixer.scale

    # The largest of each generation divides by the width's share of a head, and no setting says so.
    assert (scale("gemma2", 42), scale("gemma2", 46)) == (pytest.approx(32**-0.5), pytest.approx(16**-0.5))
    assert (scale("gemma3", 48), scale("gemma3", 62)) == (pytest.approx(32**-0.5), pytest.approx(16**-0.5))
    made = gguf_spec("gemma2", metadata("gemma2"))
    assert (made.embed_scale, made.logit_softcap, made.layers[0].mixer.softcap) == (8.0, 30.0, 50.0)
    made = gguf_spec("gemma3", metadata("gemma3"))
    assert (made.embed_scale, made.logit_softcap, made.layers[0].mixer.softcap) == (8.0, None, None)
    assert gguf_spec("gemma3", metadata("gemma3", final_logit_softcapping=20.0)).logit_softcap == 20.0
