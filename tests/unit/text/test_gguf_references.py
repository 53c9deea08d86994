"""Tokenizers built from GGUF metadata against code that isn't ours: llama.cpp and SentencePiece (`tests/references/text_make.py`)."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import normalizers, pre_tokenizers

from sterna.text.gguf_tokenizer import tokenizer_json_from_gguf
from sterna.text.incremental import DecodeStatus
from sterna.text.tokenizer import Tokenizer
from unit.text.corpus import LINES

DATA = Path(__file__).parents[2] / "data"


def reference(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return value


BYTE_LEVEL = reference("text_byte_level")
SENTENCEPIECE = reference("text_sentencepiece")


def byte_level(pre: str) -> Tokenizer:
    metadata = {"model": "gpt2", "pre": pre, "bos_token_id": 3, "eos_token_id": 4, "add_bos_token": False}
    metadata |= {"tokens": BYTE_LEVEL["tokens"], "token_type": BYTE_LEVEL["types"], "merges": BYTE_LEVEL["merges"]}
    return Tokenizer.from_json(tokenizer_json_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))


def sentencepiece(**more: Any) -> Tokenizer:
    metadata = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": False, **more}
    metadata |= {"tokens": SENTENCEPIECE["tokens"], "token_type": SENTENCEPIECE["types"], "scores": SENTENCEPIECE["scores"]}
    return Tokenizer.from_json(tokenizer_json_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))


def llama_cpp_deviates(pre: str, line: str) -> bool:
    """Where llama.cpp is known not to be what the model's own tokenizer.json says.

    It doesn't normalise, and it doesn't split again (as a `Sequence` of `Split` does) what an earlier pattern matched.
    """
    normalises = pre in ("qwen2", "deepseek-r1-qwen", "command-r")
    return (normalises and not unicodedata.is_normalized("NFC", line)) or (pre == "deepseek-coder" and "\u3000" in line)


@pytest.mark.parametrize("pre", BYTE_LEVEL["ids"])
def test_ids_equal_llama_cpps_for_every_splitting(pre: str) -> None:
    tokenizer = byte_level(pre)
    compared = 0
    for line, ids in zip(LINES, BYTE_LEVEL["ids"][pre], strict=True):
        if not llama_cpp_deviates(pre, line):
            assert tokenizer.encode(line, add_special_tokens=True) == ids, line
            assert tokenizer.decode(ids, skip_special_tokens=False) == line
            compared += 1
    assert compared >= len(LINES) - 2


def test_the_vocabulary_tells_the_splittings_apart() -> None:
    ids = {name: json.dumps(value) for name, value in BYTE_LEVEL["ids"].items()}
    assert len({ids[pre] for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-v3", "deepseek-coder")}) == 6


def test_smollm_ids_equal_the_original_definition_even_where_merges_cross_every_boundary() -> None:
    plain = json.loads(tokenizer_json_from_gguf(_metadata_without_specials()))
    original = RustTokenizer.from_str(json.dumps({**plain, "pre_tokenizer": None, "normalizer": None}))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    for line in LINES:
        assert byte_level("smollm").encode(line, add_special_tokens=True) == original.encode(line).ids


def _metadata_without_specials() -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": BYTE_LEVEL["tokens"], "token_type": BYTE_LEVEL["types"]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, "merges": BYTE_LEVEL["merges"]}.items()}


def test_a_normalising_models_ids_are_those_of_the_normalised_text() -> None:
    decomposed = next(line for line in LINES if not unicodedata.is_normalized("NFC", line))
    qwen2 = byte_level("qwen2")
    composed = normalizers.NFC().normalize_str(decomposed)
    assert qwen2.encode(decomposed, add_special_tokens=True) == qwen2.encode(composed, add_special_tokens=True)
    assert byte_level("llama-bpe").decode(byte_level("llama-bpe").encode(decomposed, add_special_tokens=True)) == decomposed


def test_ids_and_texts_equal_sentencepieces_own() -> None:
    tokenizer = sentencepiece()
    for line, ids, text in zip(SENTENCEPIECE["lines"], SENTENCEPIECE["ids"], SENTENCEPIECE["texts"], strict=True):
        assert tokenizer.encode(line, add_special_tokens=True) == ids, line
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == line


def test_the_sentencepiece_reference_falls_back_to_bytes() -> None:
    byte_ids = {i for i, kind in enumerate(SENTENCEPIECE["types"]) if kind == 6}
    assert sum(len(byte_ids & set(ids)) > 0 for ids in SENTENCEPIECE["ids"]) >= 4


def test_sentencepiece_text_leaves_piece_by_piece() -> None:
    tokenizer = sentencepiece()
    for ids, text in zip(SENTENCEPIECE["ids"], SENTENCEPIECE["texts"], strict=True):
        status = DecodeStatus(tokenizer, [1], skip_special_tokens=True)
        assert "".join([status.push([i]) for i in ids]) + status.finish() == text


def test_without_a_space_prefix_nothing_is_added_or_taken() -> None:
    tokenizer = sentencepiece(add_space_prefix=False)
    for line in SENTENCEPIECE["lines"]:
        assert tokenizer.decode(tokenizer.encode(line, add_special_tokens=True)) == line
    assert tokenizer.encode("the", add_special_tokens=True) != sentencepiece().encode("the", add_special_tokens=True)


def test_a_sentencepiece_file_without_a_flag_puts_bos_first() -> None:
    plain = sentencepiece().encode("a b", add_special_tokens=True)
    assert sentencepiece(add_bos_token=None).encode("a b", add_special_tokens=True) == [1, *plain]
    assert sentencepiece(add_bos_token=None).decode([1, *plain, 2]) == "a b"
