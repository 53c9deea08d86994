"""What a model's files say about its special tokens and its chat template, in one shape for both formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sterna.errors import ModelError
from sterna.text.gguf_tokenizer import adds_bos, special_id
from sterna.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextFacts:
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a turn; the first is the model's EOS."""
    bos_token: str | None
    eos_token: str | None
    """As chat templates want them."""
    template_tokens: dict[str, str] = field(default_factory=dict)
    """`unk_token` and the like that the files name."""
    add_bos: bool = False
    """Whether the tokenizer puts BOS before every text."""
    chat_template: str | None = None


def text_facts_from_gguf(metadata: Mapping[str, Any]) -> TextFacts:
    """Facts from GGUF metadata (keys to Python values): EOS, and end of turn and of message where the file names them."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    ids = {name: special_id(metadata, name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")}
    spelled = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    template_names = {"unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator", "cls_token": "cls", "mask_token": "mask"}
    template = metadata.get("tokenizer.chat_template")
    ends = (ids[name] for name in ("eos", "eot", "eom"))
    return TextFacts(
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        bos_token=spelled.get("bos"),
        eos_token=spelled.get("eos"),
        template_tokens={token: spelled[name] for token, name in template_names.items() if name in spelled},
        add_bos=adds_bos(metadata),
        chat_template=template if isinstance(template, str) and template else None,
    )


def text_facts_from_folder(folder: Path) -> TextFacts:
    """Facts from a folder in Hugging Face layout.

    Tokens come from tokenizer_config.json, then special_tokens_map.json, then the ids in config.json. End tokens are those of
    generation_config.json, of config.json and the tokenizer's, merged. Raises ModelError where a file is damaged, tokenizer.json
    is absent, or its decoder isn't supported.
    """
    tokenizer = Tokenizer.load(folder)
    tokenizer.table(skip_special_tokens=True)  # refuses an unsupported decoder here rather than at the first request
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    config = _json(folder / "config.json")
    config = {**_mapping(config.get("text_config")), **config}
    generation = _json(folder / "generation_config.json")
    spelled = {name: token for name, value in settings.items() if name.endswith("_token") and (token := _spelling(value)) is not None}
    spelled |= {name: token for name, value in _mapping(settings.get("extra_special_tokens")).items() if (token := _spelling(value))}
    bos_ids = _ids(tokenizer, spelled.get("bos_token")) or _id_list(config.get("bos_token_id"))
    eos_ids = [*_id_list(generation.get("eos_token_id")), *_ids(tokenizer, spelled.get("eos_token")), *_id_list(config.get("eos_token_id"))]
    eos_token = spelled.get("eos_token") or (tokenizer.id_to_token(eos_ids[0]) if eos_ids else None)
    return TextFacts(
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        bos_token=spelled.get("bos_token"),
        eos_token=eos_token,
        template_tokens={name: token for name, token in spelled.items() if name not in ("bos_token", "eos_token")},
        add_bos=bool(bos_ids) and tokenizer.encode("", add_special_tokens=True)[:1] == bos_ids[:1],
        chat_template=_chat_template(folder, settings.get("chat_template")),
    )


def _chat_template(folder: Path, inline: Any) -> str | None:
    """A file of its own goes before the tokenizer's settings; of several named templates, `default`."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as fault:
        raise ModelError(f"{folder / 'chat_template.jinja'}: {fault}") from fault
    for value in (_json(folder / "chat_template.json").get("chat_template"), inline):
        if isinstance(value, list):
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            value = named.get("default")
        if isinstance(value, str) and value:
            return value
    return None


def _json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise ModelError(f"{path}: {fault}") from fault
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _spelling(value: Any) -> str | None:
    """Tokens are written as strings or as objects with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(tokenizer: Tokenizer, token: str | None) -> list[int]:
    token_id = None if token is None else tokenizer.token_to_id(token)
    return [] if token_id is None else [token_id]


def _id_list(value: Any) -> list[int]:
    return [token_id for token_id in (value if isinstance(value, list) else [value]) if type(token_id) is int]
