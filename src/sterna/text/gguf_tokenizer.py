"""A tokenizer.json from the metadata of a GGUF file (keys `tokenizer.ggml.*`).

GGUF keeps tokens, merges or scores, and the *name* of the splitting (`tokenizer.ggml.pre`); the rest of a tokenizer.json has to
be known. What is built here is what the models' own tokenizer.json files hold, so that both routes give the same ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sterna.errors import ModelError

MARK = "\u2581"
"""SentencePiece's stand-in for a space."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Token types (`tokenizer.ggml.token_type`); the sixth, a byte, is told by its spelling."""

_PADDING_ROW = re.compile(r"\[PAD(\d+)\]")


def tokenizer_json_from_gguf(metadata: Mapping[str, Any]) -> str:
    """The tokenizer.json, as text. `metadata` maps GGUF keys to Python values.

    Raises ModelError where the kind of vocabulary or its splitting isn't known, and where the metadata is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"damaged GGUF metadata: {len(tokens)} tokens with {len(types)} types")
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelError(f"tokenizer.ggml.model {kind!r} isn't supported; supported are gpt2 (byte-level BPE) and llama (SentencePiece)")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens, types),
        **parts,
        "post_processor": _post_processor(metadata, tokens),
    }
    return json.dumps(document, ensure_ascii=False)


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    """Without the rows that a converter added to fill a padded embedding: they have no text."""
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        padding = _PADDING_ROW.fullmatch(token) if token.startswith("[PAD") else None
        if padding is None or int(padding[1]) != token_id:
            vocab.setdefault(token, token_id)
    return vocab


def _added_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything splits it: control tokens (special) and user-defined ones."""
    named = {special_id(metadata, name) for name in ("bos", "eos", "unknown")}
    added = []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind == CONTROL or (token_id in named and kind in (NORMAL, UNKNOWN))
        if token and (special or kind == USER_DEFINED):
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": token_id, "content": token, **flags, "special": special})
    return added


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """`tokenizer.ggml.{name}_token_id`, where the vocabulary has it."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None and name == "unknown" and metadata.get("tokenizer.ggml.model") == "llama":
        token_id = 0
    return token_id if isinstance(token_id, int) and 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]) else None


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether BOS goes before every text. Files older than the flag mean what their kind of vocabulary does."""
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    if flag is None:
        flag = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    return bool(flag) and special_id(metadata, "bos") is not None


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any] | None:
    before = special_id(metadata, "bos") if adds_bos(metadata) else None
    after = special_id(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token") else None
    if before is None and after is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        added = [{"SpecialToken": {"id": tokens[i], "type_id": type_id}} if i is not None else None for i in (before, after)]
        return [piece for piece in (added[0], middle, added[1]) if piece is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (before, after) if i is not None},
    }


# ---- byte-level BPE ----

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2_STEPS = [_byte_level_step(use_regex=True)]
_LLAMA3_STEPS = [_split(_LLAMA3), _byte_level_step(use_regex=False)]
_QWEN2_STEPS = [_split(_QWEN2), _byte_level_step(use_regex=False)]
_DIGIT_STEPS = [_DIGITS, _byte_level_step(use_regex=True)]

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _GPT2_STEPS,
    "gpt-2": _GPT2_STEPS,
    "phi-2": _GPT2_STEPS,
    "smollm": _DIGIT_STEPS,
    "starcoder": _DIGIT_STEPS,
    "refact": _DIGIT_STEPS,
    "command-r": _DIGIT_STEPS,
    "llama3": _LLAMA3_STEPS,
    "llama-v3": _LLAMA3_STEPS,
    "llama-bpe": _LLAMA3_STEPS,
    "smaug-bpe": _LLAMA3_STEPS,
    "dbrx": _LLAMA3_STEPS,
    "gpt-4o": [_split(_GPT4O), _byte_level_step(use_regex=False)],
    "qwen2": _QWEN2_STEPS,
    "deepseek-r1-qwen": _QWEN2_STEPS,
    "tekken": [_split(_TEKKEN), _byte_level_step(use_regex=False)],
    "deepseek-coder": [
        *(_split(pattern) for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        _DIGITS,
        _byte_level_step(use_regex=False),
    ],
    "deepseek-v3": [*(_split(pattern) for pattern in (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), _byte_level_step(use_regex=False)],
}
"""`tokenizer.ggml.pre` -> the pre-tokenizer's steps."""

_LLAMA3_NAMES = {"llama3", "llama-v3", "llama-bpe"}
_BOS_BY_DEFAULT = _LLAMA3_NAMES | {"tekken"}
_WHOLE_WORDS_FIRST = _LLAMA3_NAMES | {"tekken"}
"""A piece of text that is a token is that token, whatever the merges would make of it (`ignore_merges`)."""
_NFC = {"qwen2", "deepseek-r1-qwen", "command-r"}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    steps = PRE_TOKENIZERS.get(pre)
    if steps is None:
        raise ModelError(f"tokenizer.ggml.pre {pre!r} isn't supported; supported are {', '.join(PRE_TOKENIZERS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("the GGUF file holds no merges (tokenizer.ggml.merges) for its byte-level vocabulary")
    pairs = [merge.split(" ", 1) for merge in merges]
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": _byte_level_step(use_regex=True),
        "model": _bpe(_vocab(tokens), pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _bpe(vocab: dict[str, int], merges: Sequence[Sequence[str]], **settings: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**model, **settings, "vocab": vocab, "merges": merges}


# ---- SentencePiece ----


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """As transformers' `LlamaConverter` makes a tokenizer.json of a SentencePiece model: the form that Llama 2's and Mistral's have, in
    which text after a special token gets a space of its own too ("legacy"; GGUF doesn't tell which form a model had)."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("damaged GGUF metadata: a SentencePiece vocabulary needs one score for each token")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": MARK}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": MARK})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = special_id(metadata, "unknown")
    vocab = _vocab(tokens)
    merges = _merges_from_scores(vocab, scores, types)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True),
    }


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best piece first.

    SentencePiece merges the pair whose result scores highest; a list of merges in that order does the same.
    """
    pieces = {token: token_id for token, token_id in vocab.items() if types[token_id] in (NORMAL, UNUSED)}
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for piece, token_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[token_id], -len(left), -len(right), token_id, pieces[left], left, right))
    ranked.sort(key=lambda entry: entry[:5])
    return [(left, right) for *_, left, right in ranked]
