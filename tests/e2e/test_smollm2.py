"""The default model: 50 prompts x 64 greedy tokens are those of transformers, together and alone, cold and warm."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.engine import Answer, Ask, Engine
from e2e.reference import Reference, assert_agrees
from sterna.config.model_config import ModelConfig
from sterna.files.hub import ALIASES
from sterna.text.chat_template import ChatTemplate
from sterna.text.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "models_smollm2.json").read_text())
CASES: list[dict[str, Any]] = REFERENCE["cases"]
TOKENS: int = REFERENCE["num_tokens"]
PAGE = 16


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    made = Engine(smollm2, max_total_tokens=8192, page_size=PAGE)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def together(engine: Engine) -> list[Answer]:
    """All 50 at once, cold."""
    engine.flush()
    return engine.run(*(Ask(case["prompt_ids"], TOKENS) for case in CASES))


def agree(answer: Answer, case: dict[str, Any]) -> int:
    ids = case["ids"][: len(answer.ids)]
    return assert_agrees(answer.ids, Reference(ids, case["gaps"][: len(ids)]), repr(case["text"]))


def test_the_reference_is_of_this_file_and_of_fifty_varied_prompts() -> None:
    assert REFERENCE["gguf_sha256"] == ALIASES["smollm2"].sha256
    assert (len(CASES), TOKENS) == (50, 64)
    assert len({tuple(case["ids"]) for case in CASES}) == 50


def test_fifty_prompts_together_say_what_transformers_says(engine: Engine, together: list[Answer]) -> None:
    assert all(len(answer.ids) == TOKENS for answer in together)
    assert min(answer.batch_size for answer in together) >= 16
    same = [agree(answer, case) for answer, case in zip(together, CASES, strict=True)]
    # Near ties are rare: all but a few of 3,200 tokens are compared.
    assert sum(same) > 0.9 * len(CASES) * TOKENS


def test_prompts_are_the_texts_tokenized_and_the_messages_rendered(smollm2: Path) -> None:
    tokenizer, model = Tokenizer.load(smollm2), ModelConfig.load(smollm2)
    template = ChatTemplate.load(smollm2, model)
    assert template is not None
    for case in CASES:
        text = case["text"] if case["messages"] is None else template.render(case["messages"])
        assert text == case["text"]
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"]
    assert sum(case["messages"] is not None for case in CASES) == 20


@pytest.mark.parametrize("index", [3, 15, 40])
def test_a_prompt_alone_says_what_it_says_among_fifty_cold_and_warm(engine: Engine, together: list[Answer], index: int) -> None:
    case, tokens = CASES[index], 20
    engine.flush()
    ask = Ask(case["prompt_ids"], tokens)
    for cached in (0, len(ask.prompt) - 1):
        (answer,) = engine.run(ask)
        assert (answer.batch_size, answer.cached_tokens) == (1, cached)
        agree(answer, case)
        assert_agrees(answer.ids, Reference(together[index].ids[:tokens], case["gaps"][:tokens]))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 0])
def test_chunks_of_any_size_say_the_same(smollm2: Path, chunk_size: int) -> None:
    case = max(CASES, key=lambda case: len(case["prompt_ids"]))
    length, tokens = len(case["prompt_ids"]), 8
    under_test = Engine(smollm2, max_total_tokens=1024, chunked_prefill_size=chunk_size)
    (answer,) = under_test.run(Ask(case["prompt_ids"], tokens))
    under_test.shutdown()
    assert length > 64
    assert answer.chunks == (-(-length // chunk_size) if chunk_size else 1)
    agree(answer, case)
