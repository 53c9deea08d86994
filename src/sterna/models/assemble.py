"""Makes a resolved folder's files out of a model's: the one place where families, weights, tokenizer and template meet."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from sterna.config.model_config import GenerationDefaults, ModelConfig
from sterna.errors import ConfigError, ModelError
from sterna.files.gguf import GGUFFile
from sterna.files.hub import ModelSource
from sterna.files.safetensors import SafetensorsFolder
from sterna.models import generation, registry
from sterna.models.family import ROPE_TENSORS, Family
from sterna.models.spec import ModelSpec, RopeDynamic, RopeLinear
from sterna.models.weights import WeightIndex, index_for_gguf, index_for_hf
from sterna.text.facts import TextFacts, text_facts_from_folder, text_facts_from_gguf
from sterna.text.gguf_tokenizer import tokenizer_json_from_gguf
from sterna.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What either format gives."""

    family: Family
    spec: ModelSpec
    weights: WeightIndex
    context_len: int
    tokenizer_json: str
    stated_tokens: int
    """As the file lists them: some of those may be left out of `tokenizer_json`."""
    text: TextFacts
    generation: GenerationDefaults


def assemble(source: ModelSource, folder: Path, context_length: int | None) -> None:
    """Write `folder`'s files. Raises ModelError, naming the source, for a model that is damaged, incomplete or not supported;
    ConfigError for a context length that it can't have; OSError where `folder` can't be written to."""
    try:
        parts = _parts_of_gguf(source.path, context_length) if source.kind == "gguf" else _parts_of_folder(source.path, context_length)
        facts = _facts(source, parts)
    except ModelError as fault:
        if str(source.path) in fault.message:
            raise
        raise ModelError(f"{source.path}: {fault.message}") from fault
    (folder / "tokenizer.json").write_text(parts.tokenizer_json, encoding="utf-8")
    if parts.text.chat_template is not None:
        (folder / "chat_template.jinja").write_text(parts.text.chat_template, encoding="utf-8")
    (folder / "spec.json").write_bytes(msgspec.json.encode(parts.spec))
    parts.weights.save(folder)
    (folder / "facts.json").write_bytes(msgspec.json.encode(facts))


def _parts_of_gguf(path: Path, context_length: int | None) -> _Parts:
    file = GGUFFile.open(path)
    metadata = file.metadata
    if metadata.get("split.count", 1) != 1:
        raise ModelError(f"one of {metadata['split.count']} parts of a model: join them with llama.cpp's gguf-split --merge")
    family = registry.family_of_gguf(metadata)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    native = family.context_len_from_gguf(metadata)
    context_len = context_length or native
    rope_tensors = {name: tuple(file.float32(name).ravel().tolist()) for name in ROPE_TENSORS if name in file.tensors}
    spec = family.spec_from_gguf(metadata, shapes, context_len=context_len, rope_tensors=rope_tensors)
    _check_context(spec, context_len, native)
    return _Parts(
        family=family,
        spec=spec,
        weights=index_for_gguf(spec, family, file),
        context_len=context_len,
        tokenizer_json=tokenizer_json_from_gguf(metadata),
        stated_tokens=len(metadata["tokenizer.ggml.tokens"]),
        text=text_facts_from_gguf(metadata),
        generation=generation.from_gguf(metadata),
    )


def _parts_of_folder(path: Path, context_length: int | None) -> _Parts:
    config = _json_object(path / "config.json")
    tensors = SafetensorsFolder.open(path)
    family = registry.family_of_hf(config)
    shapes = {name: tensor.shape for name, tensor in tensors.tensors.items()}
    native = family.context_len_from_hf(config)
    context_len = context_length or native
    spec = family.spec_from_hf(config, shapes, context_len=context_len)
    _check_context(spec, context_len, native)
    generation_file = path / "generation_config.json"
    return _Parts(
        family=family,
        spec=spec,
        weights=index_for_hf(spec, family, tensors),
        context_len=context_len,
        tokenizer_json=_without_strangers(_tokenizer_json_of_folder(path), spec.vocab_size),
        stated_tokens=0,  # a tokenizer.json says no number besides its tokens
        text=text_facts_from_folder(path),
        generation=generation.from_hf(_json_object(generation_file) if generation_file.is_file() else {}),
    )


def _facts(source: ModelSource, parts: _Parts) -> ModelConfig:
    """Raises ModelError where the tokenizer has ids that the embedding has no row for. (Rows without a token are padding.)"""
    tokens, rows = _tokens(parts), parts.spec.vocab_size
    if tokens > rows:
        raise ModelError(
            f"the tokenizer has {tokens} tokens (ids up to {tokens - 1}), but the embedding has {rows} rows: they are of different models"
        )
    text = parts.text
    return ModelConfig(
        name=source.name,
        source=str(source.path),
        family=parts.family.name,
        weights_dtype=_dominating_dtype(parts.weights),
        num_parameters=sum(prod(entry.shape) for entry in parts.weights.entries.values()),
        vocab_size=rows,
        context_len=parts.context_len,
        # Ids beyond the embedding are leftovers of a larger sibling: they can neither be fed nor sampled.
        bos_token_id=text.bos_token_id if text.bos_token_id is not None and 0 <= text.bos_token_id < rows else None,
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if 0 <= token_id < rows),
        generation=parts.generation,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        template_tokens=text.template_tokens,
    )


def _tokens(parts: _Parts) -> int:
    """One more than the largest id: of a token, listed or added, or of one that the tokenizer only ever puts around a text."""
    tokenizer = Tokenizer.from_json(parts.tokenizer_json)
    around = tokenizer.encode("", add_special_tokens=True)
    return max(tokenizer.vocab_size, parts.stated_tokens, max(around, default=-1) + 1)


def _without_strangers(tokenizer_json: str, rows: int) -> str:
    """Without the special tokens that were added beyond the embedding's rows. They are a larger sibling's (Gemma 3 1B, which reads text
    only, lists the token that stands for a picture): the model can't be fed them, and a text that spells one is text. Others beyond it
    stay, to be refused."""
    if Tokenizer.from_json(tokenizer_json).vocab_size <= rows:
        return tokenizer_json
    document = json.loads(tokenizer_json)
    added = document.get("added_tokens", [])
    strangers = [token for token in added if token["id"] >= rows and token["special"]]
    for token in strangers:
        log.warning("the tokenizer's special token %r (id %d) is left out: the embedding has %d rows", token["content"], token["id"], rows)
    document["added_tokens"] = [token for token in added if token not in strangers]
    return json.dumps(document, ensure_ascii=False)


def _dominating_dtype(weights: WeightIndex) -> str:
    """The stored type of most numbers in matrices."""
    sizes: Counter[str] = Counter()
    for entry in weights.entries.values():
        if len(entry.shape) == 2:
            sizes[entry.dtype] += prod(entry.shape)
    return sizes.most_common(1)[0][0]


def _check_context(spec: ModelSpec, context_len: int, native: int) -> None:
    """Beyond the native context a model has seen no position. Linear and dynamic scaling are made to stretch it by their factor; under the
    other kinds the native length counts the stretch already, and so it does where some layers only are scaled. Raises ConfigError."""
    scalings = {layer.mixer.rope.scaling for layer in spec.layers if layer.mixer.rope is not None}
    factors = [scaling.factor if isinstance(scaling, RopeLinear | RopeDynamic) else 1.0 for scaling in scalings]
    limit = int(native * min(factors, default=1.0))
    if context_len > limit:
        stretched = f" ({native}, stretched by its rope scaling)" if limit != native else ""
        raise ConfigError(f"--context-length {context_len} is more than the model's {limit} tokens{stretched}")


def _tokenizer_json_of_folder(path: Path) -> str:
    try:
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path}: there is no tokenizer.json; make one with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise ModelError(f"{path / 'tokenizer.json'}: can't be read: {fault}") from fault


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelError(f"{path}: can't be read: {fault}") from fault
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
