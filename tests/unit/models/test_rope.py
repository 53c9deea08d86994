"""Frequencies against transformers' own functions, which share no code with ours."""

import numpy as np
import pytest

from sterna.models.registry import load_family
from sterna.models.rope import inverse_frequencies
from sterna.models.spec import RopeDynamic, RopeFactors, RopeLinear, RopeLlama3, RopeScaling, RopeSpec, RopeYarn

transformers = pytest.importorskip("transformers")

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES: dict[str, tuple[dict[str, object], RopeScaling, int | None]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, RopeLinear(4.0), None),
    "dynamic within its window": ({"rope_type": "dynamic", "factor": 2.0}, RopeDynamic(2.0, 2048, 2048), 1000),
    "dynamic beyond its window": ({"rope_type": "dynamic", "factor": 2.0}, RopeDynamic(2.0, 2048, 4096), 4096),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, RopeLlama3(8.0, 1.0, 4.0, 8192), None),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, RopeYarn(4.0, 512), None),
    "yarn untruncated": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False, "beta_fast": 16, "beta_slow": 2},
        RopeYarn(4.0, 512, beta_fast=16.0, beta_slow=2.0, truncate=False),
        None,
    ),
    "yarn with an attention factor": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
        RopeYarn(4.0, 512, attention_factor=0.7),
        None,
    ),
    "yarn with mscale": (
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.5},
        RopeYarn(40.0, 512, mscale=1.0, mscale_all_dim=0.5),
        None,
    ),
    "yarn whose ramp has no width": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6},
        RopeYarn(2.0, 6),
        None,
    ),
}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_attention_scale_are_those_of_transformers(case: str, theta: float, head_dim: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings, scaling, seq_len = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta, **settings},
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[str(settings["rope_type"])](config, "cpu", seq_len=seq_len)
    frequencies, scale = inverse_frequencies(RopeSpec(theta, head_dim, scaling))
    # transformers computes in float32; a ramp's rounding there costs some ulps.
    np.testing.assert_allclose(frequencies, expected.numpy().astype(np.float64), rtol=2e-6)
    assert scale == pytest.approx(expected_scale, abs=1e-12)
    assert frequencies.dtype == np.float64
    assert frequencies.shape == (head_dim // 2,)


def test_plain_frequencies_fall_from_1_by_a_constant_ratio() -> None:
    frequencies, scale = inverse_frequencies(RopeSpec(10_000.0, 64))
    np.testing.assert_allclose(frequencies[1:] / frequencies[:-1], 10_000.0 ** (-2 / 64))
    assert (frequencies[0], scale) == (1.0, 1.0)


def test_factors_divide_pair_by_pair_and_their_count_is_checked() -> None:
    plain, _ = inverse_frequencies(RopeSpec(10_000.0, 8))
    divided, scale = inverse_frequencies(RopeSpec(10_000.0, 8, RopeFactors((1.0, 2.0, 4.0, 8.0))))
    np.testing.assert_allclose(plain / divided, [1, 2, 4, 8])
    assert scale == 1.0
    with pytest.raises(ValueError, match="3 rope factors for 4 pairs"):
        inverse_frequencies(RopeSpec(10_000.0, 8, RopeFactors((1.0, 2.0, 4.0))))


@pytest.mark.parametrize("long", [False, True])
def test_long_rope_is_that_of_transformers_on_either_side_of_the_original_window(long: bool) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"short_factor": [1.0 + i / 4 for i in range(12)], "long_factor": [1.0 + i * i for i in range(12)]}
    config = transformers.Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "factor": 8.0, **settings},
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=513 if long else 512)
    made = load_family("phi3").spec_from_hf({**config.to_dict(), "tie_word_embeddings": True}, {}, context_len=513 if long else 512)
    rope = made.layers[0].mixer.rope
    assert rope is not None
    frequencies, scale = inverse_frequencies(rope)
    np.testing.assert_allclose(frequencies, expected.numpy().astype(np.float64), rtol=2e-6)
    assert scale == pytest.approx(expected_scale, abs=1e-12)
