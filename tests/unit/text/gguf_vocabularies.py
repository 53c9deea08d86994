"""Vocabularies learned from the corpus, as an original tokenizer.json and as the GGUF metadata that a converter makes of it."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer as RustTokenizer

from unit.text.corpus import LINES

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")


def isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Pattern(pattern), behavior="isolated")


def raw_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def original(steps: Sequence[pre_tokenizers.PreTokenizer], *, nfc: bool = False) -> RustTokenizer:
    """A byte-level BPE tokenizer with these steps, learned from the corpus; special tokens first, one plain added token last."""
    inner = RustTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    inner.decoder = decoders.ByteLevel()
    if nfc:
        inner.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(LINES * 2, trainer)
    inner.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return inner


def gguf_metadata(inner: RustTokenizer, pre: str | None, **more: Any) -> dict[str, Any]:
    """What a converter writes: tokens by id, their types, merges."""
    document = json.loads(inner.to_str())
    vocab = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    plain = {entry["content"] for entry in document["added_tokens"] if not entry["special"]}
    types = [3 if token in SPECIAL else 4 if token in plain else 1 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    metadata = {"model": "gpt2", "tokens": [*tokens, f"[PAD{len(tokens)}]"], "token_type": [*types, 5], "merges": merges, **more}
    if pre is not None:
        metadata["pre"] = pre
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
