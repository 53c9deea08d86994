"""Phi-3: LongRoPE over all of a head or a part, and windows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sterna.errors import ModelError
from sterna.models.registry import load_family
from sterna.models.spec import RopeLong, RopeSpec
from unit.models.settings import SHAPES, config, gguf_spec, metadata, spec, windows

SHORT, LONG = [1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75], [1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0]


def phi3_rope(settings: dict[str, object] | None, *, context_len: int = 1024, **changes: object) -> RopeSpec:
    whole = config("phi3", original_max_position_embeddings=256, **changes)
    old = spec("phi3", {**whole, "rope_scaling": settings}, context_len=context_len)
    new = spec("phi3", {**whole, "rope_parameters": settings}, context_len=context_len)
    assert old == new
    rope = new.layers[0].mixer.rope
    assert rope is not None
    return rope


def test_phi_3s_long_rope_is_fixed_by_the_configured_context() -> None:
    factors = {"short_factor": SHORT, "long_factor": LONG}
    for kind in ("longrope", "su"):
        # The default attention factor, for a window stretched from 256 to 1,024.
        recommended = pytest.approx((1 + math.log(4) / math.log(256)) ** 0.5)
        for context_len, expected in ((256, SHORT), (257, LONG), (1024, LONG)):
            rope = phi3_rope({"type": kind, **factors}, context_len=context_len)
            assert isinstance(rope.scaling, RopeLong)
            assert (rope.theta, rope.dim, rope.scaling.factors) == (1e4, 16, tuple(expected))
            assert rope.scaling.attention_factor == recommended
    given = phi3_rope({"rope_type": "longrope", "attention_factor": 1.5, "rope_theta": 5e5, **factors})
    assert given == RopeSpec(5e5, 16, RopeLong(tuple(LONG), 1.5))
    small = phi3_rope({"rope_type": "longrope", "factor": 0.5, **factors})
    assert small.scaling == RopeLong(tuple(LONG), 1.0)
    assert load_family("phi3").context_len_from_hf(config("phi3", original_max_position_embeddings=256)) == 1024


def test_phi_3_may_turn_a_part_of_each_head_only() -> None:
    assert phi3_rope(None, partial_rotary_factor=0.75) == RopeSpec(1e4, 12)
    assert phi3_rope({"rope_type": "default", "partial_rotary_factor": 0.5}, partial_rotary_factor=0.75) == RopeSpec(1e4, 8)
    six = {"rope_type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6], "factor": 1.0}
    assert phi3_rope(six, partial_rotary_factor=0.75) == RopeSpec(1e4, 12, RopeLong(tuple(LONG[:6]), 1.0))


@pytest.mark.parametrize(
    ("settings", "changes", "named"),
    [
        ({"long_factor": LONG}, {}, "short_factor"),
        ({"short_factor": SHORT, "long_factor": LONG[:7]}, {}, "long_factor"),
        ({"short_factor": SHORT, "long_factor": [0.0, *LONG[1:]]}, {}, "long_factor"),
        ({"short_factor": SHORT, "long_factor": ["1", *LONG[1:]]}, {}, "long_factor"),
        ({"short_factor": SHORT, "long_factor": LONG, "factor": 0}, {}, "factor"),
        ({"short_factor": SHORT, "long_factor": LONG, "attention_factor": 0}, {}, "attention_factor"),
        ({"short_factor": SHORT, "long_factor": LONG, "short_mscale": 1.1}, {}, "short_mscale"),
        ({"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512}, {}, "original_max_position_embeddings"),
        ({"short_factor": SHORT, "long_factor": LONG}, {"original_max_position_embeddings": 1}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0}, {}, "yarn"),
        ({"rope_type": "linear", "factor": 4.0}, {}, "linear"),
        (None, {"partial_rotary_factor": 0.7}, "partial_rotary_factor"),
        (None, {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        (None, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (None, {"attention_bias": True}, "attention_bias"),
        (None, {"lm_head_bias": True}, "lm_head_bias"),
        (None, {"full_attn_mod": 2}, "full_attn_mod"),
    ],
)
def test_a_setting_of_phi_3_that_is_unknown_or_senseless_is_refused_by_name(
    settings: dict[str, object] | None, changes: dict[str, object], named: str
) -> None:
    whole = {"rope_type": "longrope", **settings} if settings else None
    with pytest.raises(ModelError, match=named):
        spec("phi3", config("phi3", **{"original_max_position_embeddings": 256, **changes}, rope_scaling=whole))


def test_phi_3s_window_is_on_every_layer_and_null_is_none() -> None:
    assert windows("phi3", sliding_window=128) == [128] * 3
    assert windows("phi3", sliding_window=None) == windows("phi3") == [None] * 3


def test_phi_3s_long_rope_in_gguf_is_fixed_by_the_configured_context() -> None:
    tensors = {"rope_factors_short.weight": [1.0, 1.5, 2.0, 2.5], "rope_factors_long.weight": [1.0, 4.0, 16.0, 64.0]}
    shapes = {**SHAPES, **dict.fromkeys(tensors, (4,))}

    def rope(context_len: int = 1024, given: Any = tensors, **changes: object) -> RopeSpec | None:
        settings = {"rope__dimension_count": 8, "rope__scaling__original_context_length": 256, "rope__scaling__attn_factor": 1.25}
        made = gguf_spec("phi3", metadata("phi3", **{**settings, **changes}), context_len=context_len, shapes=shapes, rope_tensors=given)
        return made.layers[0].mixer.rope

    assert rope(256) == RopeSpec(5e5, 8, RopeLong((1.0, 1.5, 2.0, 2.5), 1.25))
    assert rope(257) == rope(rope__scaling__type="longrope") == RopeSpec(5e5, 8, RopeLong((1.0, 4.0, 16.0, 64.0), 1.25))
    for wrong, named in (
        ({"given": {"rope_factors_short.weight": [1.0] * 4}}, "rope_factors_long.weight"),
        ({"given": {**tensors, "rope_factors_short.weight": [1.0] * 3}}, "rope_factors_short.weight"),
        ({"given": {**tensors, "rope_factors_long.weight": [0.0] * 4}}, "rope_factors_long.weight"),
        ({"rope__scaling__attn_factor": 0.0}, "attn_factor"),
        ({"rope__scaling__type": "yarn"}, r"rope\.scaling\.type"),
        ({"rope__scaling__factor": 4.0}, r"rope\.scaling\.factor"),
        ({"rope__dimension_count": 7}, r"rope\.dimension_count"),
        ({"rope__dimension_count": 18}, r"rope\.dimension_count"),
    ):
        with pytest.raises(ModelError, match=named):
            rope(**wrong)
    assert gguf_spec("phi3", metadata("phi3", rope__dimension_count=8)).layers[0].mixer.rope == RopeSpec(5e5, 8)
    assert load_family("phi3").context_len_from_gguf(metadata("phi3", rope__scaling__type="longrope")) == 1024


def test_phi_3s_window_in_gguf_is_the_one_that_it_was_trained_with() -> None:
    assert [layer.mixer.window for layer in gguf_spec("phi3", metadata("phi3", attention__sliding_window=128)).layers] == [128] * 3
    assert gguf_spec("phi3", metadata("phi3", attention__sliding_window=0)).layers[0].mixer.window is None
