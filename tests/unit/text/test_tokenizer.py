"""Encoding and decoding: what the library does, made safe for whatever ids and texts come."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sterna.errors import InvalidRequest, ModelError
from sterna.text.tokenizer import Tokenizer
from unit.text.corpus import LINES
from unit.text.gguf_vocabularies import original
from unit.text.vocabularies import ALL

INNER = original([pre_tokenizers.ByteLevel(add_prefix_space=False)])
TOKENIZER = Tokenizer.from_json(INNER.to_str())
REFERENCE = PreTrainedTokenizerFast(tokenizer_object=RustTokenizer.from_str(INNER.to_str()))


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans(), st.booleans())
def test_decode_equals_transformers_and_spaces_between_special_tokens_changes_nothing(ids: list[int], skip: bool, spaces: bool) -> None:
    reference = REFERENCE.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces) == reference


def test_encode_equals_transformers() -> None:
    for line in LINES:
        assert TOKENIZER.encode(line, add_special_tokens=True) == REFERENCE.encode(line)


@pytest.mark.parametrize("name", ALL)
def test_ids_beyond_the_vocabulary_have_no_text(name: str) -> None:
    tokenizer = ALL[name]
    a = tokenizer.token_to_id("a")
    assert a is not None
    assert tokenizer.decode([tokenizer.vocab_size, a, 2**31, -1, tokenizer.vocab_size + 7]) == tokenizer.decode([a]) == "a"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.id_to_token(-1) is None


def test_a_batch_decodes_as_its_members_do() -> None:
    batch = [[1, 2, 300], [], [TOKENIZER.vocab_size], list(range(200, 260))]
    assert TOKENIZER.decode_batch(batch) == [TOKENIZER.decode(ids) for ids in batch]
    assert TOKENIZER.decode_batch([]) == []


def test_special_tokens_are_those_that_decode_leaves_out() -> None:
    for token_id in range(TOKENIZER.vocab_size):
        assert TOKENIZER.is_special(token_id) == (
            TOKENIZER.decode([token_id]) == "" != TOKENIZER.decode([token_id], skip_special_tokens=False)
        )
    assert TOKENIZER.is_special(0)
    assert not TOKENIZER.is_special(TOKENIZER.vocab_size - 1)
    assert TOKENIZER.id_to_token(TOKENIZER.vocab_size - 1) == "<think>"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \udc80"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode(text, add_special_tokens=True)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    inner = RustTokenizer.from_str(INNER.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=20)
    limited = Tokenizer.from_json(inner.to_str())
    assert limited.encode(LINES[0], add_special_tokens=True) == TOKENIZER.encode(LINES[0], add_special_tokens=True)


def test_threads_encode_at_once() -> None:
    lines = LINES * 20
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda line: TOKENIZER.encode(line, add_special_tokens=False), lines))
    assert together == [TOKENIZER.encode(line, add_special_tokens=False) for line in lines]


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(INNER.to_str())
    assert Tokenizer.load(tmp_path).vocab_size == TOKENIZER.vocab_size


def test_a_decoder_that_cannot_be_run_token_by_token_is_refused() -> None:
    document = json.loads(INNER.to_str())
    document["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(ModelError, match="CTC"):
        Tokenizer.from_json(json.dumps(document)).table(skip_special_tokens=True)
