"""What a model's files recommend for sampling, in the terms of `SamplingParams`."""

from __future__ import annotations

import pytest

from sterna.config.model_config import GenerationDefaults
from sterna.errors import ModelError
from sterna.models import generation


def test_what_isnt_said_has_no_default() -> None:
    assert generation.from_hf({"do_sample": False, "max_new_tokens": 5, "temperature": None}) == GenerationDefaults()


def test_zero_switches_top_k_and_top_p_off() -> None:
    assert generation.from_hf({"top_k": 0, "top_p": 0}) == GenerationDefaults(top_k=-1, top_p=1.0)


def test_gguf_sampling_keys_are_read_but_for_the_windowed_penalty() -> None:
    names = {"temp": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5}
    metadata = {f"general.sampling.{name}": value for name, value in names.items()}
    assert generation.from_gguf(metadata) == GenerationDefaults(temperature=0.5, top_k=40, top_p=0.75, min_p=0.25)


def test_a_bad_gguf_value_is_named_as_the_file_names_it() -> None:
    with pytest.raises(ModelError, match=r"GGUF metadata: general\.sampling\.temp is nan, not a number"):
        generation.from_gguf({"general.sampling.temp": float("nan")})
