"""The default model's tokenizer, from its real GGUF file, against llama.cpp's reading of it (`tests/references/text_make.py`)."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from sterna.files.cache import cache_root
from sterna.files.gguf import GGUFFile
from sterna.files.hub import ALIASES, locate
from sterna.text.facts import text_facts_from_gguf
from sterna.text.gguf_tokenizer import tokenizer_json_from_gguf
from sterna.text.incremental import DecodeStatus, push_batch
from sterna.text.tokenizer import Tokenizer
from unit.text.corpus import LINES

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "text_smollm2.json").read_text())


@pytest.fixture(scope="module")
def file() -> GGUFFile:
    return GGUFFile.open(locate("smollm2", cache_root(), progress=False).path)


@pytest.fixture(scope="module")
def tokenizer(file: GGUFFile) -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json_from_gguf(file.metadata))


def test_ids_and_texts_equal_llama_cpps(tokenizer: Tokenizer) -> None:
    assert REFERENCE["sha256"] == ALIASES["smollm2"].sha256
    for line, ids in zip(LINES, REFERENCE["ids"], strict=True):
        assert tokenizer.encode(line, add_special_tokens=True) == ids, line
        assert tokenizer.decode(ids, skip_special_tokens=False) == line


def test_transformers_conversion_of_the_file_deviates_from_the_original_and_ours_does_not(file: GGUFFile, tokenizer: Tokenizer) -> None:
    """SmolLM2's tokenizer.json splits digits one by one (`Digits`, then `ByteLevel` with its regular expression)."""
    architecture, settings, _ = get_gguf_tokenizer(str(file.path))
    theirs, _ = convert_gguf_tokenizer(architecture, settings)
    original = RustTokenizer.from_str(theirs.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    for text in ("१२३ ٣٤٥", "½ ²"):
        assert theirs.encode(text).ids != original.encode(text).ids == tokenizer.encode(text, add_special_tokens=True)
    for line in LINES:
        assert tokenizer.encode(line, add_special_tokens=True) == original.encode(line).ids


def test_the_files_facts(file: GGUFFile) -> None:
    facts = text_facts_from_gguf(file.metadata)
    assert (facts.bos_token, facts.eos_token, facts.eos_token_ids, facts.add_bos) == ("<|im_start|>", "<|im_end|>", (2,), False)
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template


def test_random_tokens_leave_one_by_one_as_their_one_shot_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(5)
    outputs = [[draw.randrange(tokenizer.vocab_size) for _ in range(200)] for _ in range(32)]
    skips = [draw.random() < 0.5 for _ in outputs]
    statuses = [DecodeStatus(tokenizer, [], skip_special_tokens=skip) for skip in skips]
    texts = [""] * len(outputs)
    for step in zip(*outputs, strict=True):
        texts = [text + more for text, more in zip(texts, push_batch(statuses, [[i] for i in step]), strict=True)]
    finished = [text + status.finish() for text, status in zip(texts, statuses, strict=True)]
    assert finished == [tokenizer.decode(ids, skip_special_tokens=skip) for ids, skip in zip(outputs, skips, strict=True)]
    assert any("\ufffd" in text for text in finished)
