"""Every family, variant and format, through scheduler and executor: greedy tokens are those of transformers and of other readers."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from e2e.conftest import TinyModels
from e2e.engine import Engine
from e2e.reference import Reference, assert_agrees
from sterna.models.registry import FAMILIES
from tiny_gguf import has_gguf

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "models_tiny_gguf.json").read_text())
PROMPTS: list[list[int]] = REFERENCE["prompts"]
"""One id; a sentence; and 200 ids: longer than any window here and than the original windows of scaled ropes."""
TOKENS = 32

VARIANTS = sorted(tiny_models.VARIANTS)
GGUF_VARIANTS = [name for name in VARIANTS if has_gguf(name)]


def answers(tiny: TinyModels, model: Path) -> list[list[int]]:
    return Engine(tiny.resolve(model)).ids(*PROMPTS, tokens=TOKENS)


def test_the_variants_cover_what_is_promised() -> None:
    """Families, rope scalings, tied and untied, biases, qk-norm, windows."""
    variants = tiny_models.VARIANTS.values()
    configs = [variant.config for variant in variants]
    assert {variant.family for variant in variants} == set(FAMILIES)
    assert {variant.rope["rope_type"] for variant in variants} == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    assert {config["tie_word_embeddings"] for config in configs} == {True, False}
    assert {tiny_models.VARIANTS[name].family for name in GGUF_VARIANTS} == set(FAMILIES)
    assert any(config.get("attention_bias") and config.get("mlp_bias") for config in configs)
    assert sum(bool(config.get("sliding_window")) for config in configs) >= 3


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_says_what_transformers_says(tiny: TinyModels, name: str) -> None:
    folder = tiny.hf(name)
    for prompt, ids in zip(PROMPTS, answers(tiny, folder), strict=True):
        assert assert_agrees(ids, tiny.oracle(folder).greedy(prompt, TOKENS), f"{name} after {len(prompt)}") > 0


STORED = [("bfloat16", False), ("float16", False), ("float32", True), ("bfloat16", True)]
STORED_CASES = [(name, dtype, sharded) for name in ("llama", "mistral", "qwen2", "qwen3") for dtype, sharded in STORED]
# Norms to which 1 is added, fused tensors, experts.
STORED_CASES += [("gemma3", "bfloat16", True), ("phi3", "float16", True), ("mixtral", "bfloat16", True)]


@pytest.mark.parametrize(("name", "dtype", "sharded"), STORED_CASES)
def test_stored_types_and_shards_make_no_difference(tiny: TinyModels, name: str, dtype: str, sharded: bool) -> None:
    folder = tiny.hf(name, dtype, sharded)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    for prompt, ids in zip(PROMPTS, answers(tiny, folder), strict=True):
        assert assert_agrees(ids, tiny.oracle(folder).greedy(prompt, TOKENS), f"{name} {dtype}") > 0


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_a_gguf_file_says_what_the_folder_with_its_weights_says(tiny: TinyModels, name: str) -> None:
    for prompt, ids in zip(PROMPTS, answers(tiny, tiny.gguf(name)), strict=True):
        assert assert_agrees(ids, tiny.oracle(tiny.hf(name)).greedy(prompt, TOKENS), f"{name} after {len(prompt)}") > 0


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['variant']}-{case['quant']}-{case['reader']}")
def test_a_gguf_file_says_what_another_reader_of_it_says(tiny: TinyModels, case: dict[str, Any]) -> None:
    """Computed once (`tests/references/models_make.py`): llama.cpp on float32 files, transformers on quantised ones too."""
    name = case["variant"]
    assert case["weights_sha256"] == tiny_models.weights_sha256(name)
    for ids, known in zip(answers(tiny, tiny.gguf(name, case["quant"])), case["outputs"], strict=True):
        # A reader may have ended early, at an end token.
        assert assert_agrees(ids[: len(known["ids"])], Reference(known["ids"], known["gaps"]), f"{name} {case['quant']}") > 0


def test_other_readers_have_read_every_variant_and_every_type() -> None:
    cases = REFERENCE["cases"]
    assert {case["variant"] for case in cases if case["reader"] == "llama.cpp"} == set(GGUF_VARIANTS)
    assert {case["quant"] for case in cases} >= {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"}
