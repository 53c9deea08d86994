"""A tokenizer built from GGUF metadata behaves as the original tokenizer.json that the metadata was made from."""

from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from sterna.errors import ModelError
from sterna.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_json_from_gguf
from sterna.text.tokenizer import Tokenizer
from unit.text.corpus import LINES
from unit.text.gguf_vocabularies import gguf_metadata, isolated, original, raw_bytes

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

# The originals, as the models' own tokenizer.json files define them.
ORIGINALS: dict[str, dict[str, Any]] = {
    "gpt-2": {"steps": [WORDS]},
    "smollm": {"steps": [DIGITS, WORDS]},
    "llama-bpe": {"steps": [isolated(LLAMA3), raw_bytes()]},
    "qwen2": {"steps": [isolated(QWEN2), raw_bytes()], "nfc": True},
    "tekken": {"steps": [isolated(TEKKEN), raw_bytes()]},
    "deepseek-v3": {"steps": [isolated(r"\p{N}{1,3}"), isolated("[一-龥぀-ゟ゠-ヿ]+"), isolated(DEEPSEEK3), raw_bytes()]},
    "deepseek-coder": {
        "steps": [*map(isolated, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")), DIGITS, raw_bytes()],
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=ORIGINALS)
def pair(request: pytest.FixtureRequest) -> tuple[RustTokenizer, Tokenizer]:
    inner = original(**ORIGINALS[request.param])
    if request.param in ("llama-bpe", "tekken"):
        inner.model.ignore_merges = True
    return inner, Tokenizer.from_json(tokenizer_json_from_gguf(gguf_metadata(inner, request.param)))


def test_ids_equal_the_originals(pair: tuple[RustTokenizer, Tokenizer]) -> None:
    theirs, ours = pair
    for line in [*LINES, "\n".join(LINES)]:
        assert ours.encode(line, add_special_tokens=False) == theirs.encode(line, add_special_tokens=False).ids, line


def test_texts_equal_the_originals(pair: tuple[RustTokenizer, Tokenizer]) -> None:
    theirs, ours = pair
    size = theirs.get_vocab_size()
    runs = [theirs.encode(line, add_special_tokens=False).ids for line in LINES] + [list(range(i, size, 7)) for i in range(7)]
    for ids in runs:
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_transformers_own_conversion_ignores_the_smollm_splitting_of_digits_and_ours_does_not() -> None:
    inner = original(**ORIGINALS["smollm"])
    metadata = gguf_metadata(inner, "smollm")
    ours = Tokenizer.from_json(tokenizer_json_from_gguf(metadata))
    names = {"pre": "pre_tokenizer_type", "model": "tokenizer_type"}
    stripped = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    theirs, _ = convert_gguf_tokenizer("llama", {names.get(key, key): value for key, value in stripped.items()})
    deviating = ["१२३ ٣٤٥", "½ ² ①⑳", "10 000"]
    assert any(theirs.encode(text, add_special_tokens=False).ids != inner.encode(text).ids for text in deviating)
    for text in deviating:
        assert ours.encode(text, add_special_tokens=False) == inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_where_transformers_knows_a_splitting_ours_is_the_same(pre: str) -> None:
    theirs = pre_tokenizers.Sequence([isolated(GGUF_PRE_TOKENIZER_SPLITS[pre]), raw_bytes()])
    ours = RustTokenizer.from_str(tokenizer_json_from_gguf(gguf_metadata(original([WORDS]), pre))).pre_tokenizer
    for line in LINES:
        assert ours.pre_tokenize_str(line) == theirs.pre_tokenize_str(line)


def test_every_known_splitting_gives_a_tokenizer_that_keeps_the_text() -> None:
    inner = original([WORDS])
    for pre in [*PRE_TOKENIZERS, None]:
        tokenizer = Tokenizer.from_json(tokenizer_json_from_gguf(gguf_metadata(inner, pre, add_bos_token=False)))
        for line in (LINES[0], LINES[1], LINES[2], LINES[4]):  # in composed form: some of the models normalise
            assert tokenizer.decode(tokenizer.encode(line, add_special_tokens=True)) == line


def test_gpt_4os_splitting_is_that_of_its_published_pattern() -> None:
    """Words end where a small letter is followed by a capital, keep their contraction, and numbers go by threes."""
    pre = RustTokenizer.from_str(tokenizer_json_from_gguf(gguf_metadata(original([WORDS]), "gpt-4o"))).pre_tokenizer
    expected = {
        "helloWorld's end, I'LL": ["hello", "World's", "Ġend", ",", "ĠI'LL"],
        "HTTPServer 12345": ["HTTPServer", "Ġ", "123", "45"],
        "a/b //\n\nÉTÉs": ["a", "/b", "Ġ//ĊĊ", "ÃīTÃīs"],
        "don't  stop\n": ["don't", "Ġ", "Ġstop", "Ċ"],
    }
    for text, pieces in expected.items():
        assert [piece for piece, _ in pre.pre_tokenize_str(text)] == pieces


def test_an_unknown_splitting_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'klingon'.*smollm.*qwen2"):
        tokenizer_json_from_gguf(gguf_metadata(original([WORDS]), "klingon"))


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", None])
def test_an_unknown_kind_of_vocabulary_is_refused_by_name(kind: str | None) -> None:
    with pytest.raises(ModelError, match=repr(kind)):
        tokenizer_json_from_gguf({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]})


def test_damaged_metadata_is_refused() -> None:
    whole = gguf_metadata(original([WORDS]), "gpt-2")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        with pytest.raises(ModelError, match=key):
            tokenizer_json_from_gguf({name: value for name, value in whole.items() if name != key})
    with pytest.raises(ModelError, match="types"):
        tokenizer_json_from_gguf({**whole, "tokenizer.ggml.token_type": [1]})


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [3], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [3], [4]),
        ("smollm", {"add_eos_token": True}, [], [4]),
        ("llama-bpe", {}, [3], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
)
def test_the_flags_decide_what_goes_around_a_text(pre: str, flags: dict[str, Any], before: list[int], after: list[int]) -> None:
    metadata = gguf_metadata(original([WORDS]), pre, bos_token_id=3, eos_token_id=4, **flags)
    tokenizer = Tokenizer.from_json(tokenizer_json_from_gguf(metadata))
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello", add_special_tokens=True) == before + plain + after


def test_rows_that_only_pad_the_embedding_have_no_text() -> None:
    metadata = gguf_metadata(original([WORDS]), "gpt-2")
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = Tokenizer.from_json(tokenizer_json_from_gguf(metadata))
    assert tokenizer.decode([last, last + 5]) == ""
    assert last not in tokenizer.encode(f"[PAD{last}]", add_special_tokens=False)
