"""Special tokens, end tokens and template, from either format."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing

from sterna.errors import ModelError
from sterna.text.facts import TextFacts, text_facts_from_folder, text_facts_from_gguf
from unit.text.gguf_vocabularies import gguf_metadata, original

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
INNER = original([WORDS])


def folder_of(tmp_path: Path, **files: Any) -> Path:
    (tmp_path / "tokenizer.json").write_text(INNER.to_str())
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_gguf_names_end_of_text_of_turn_and_of_message() -> None:
    ids = {"bos_token_id": 3, "eos_token_id": 4, "eot_token_id": 2, "eom_token_id": 4, "unknown_token_id": 0, "padding_token_id": 10**6}
    metadata = {**gguf_metadata(INNER, "llama-bpe", **ids), "tokenizer.chat_template": "{{ x }}"}
    assert text_facts_from_gguf(metadata) == TextFacts(
        bos_token_id=3,
        eos_token_ids=(4, 2),
        bos_token="<s>",
        eos_token="</s>",
        template_tokens={"unk_token": "<|endoftext|>"},
        add_bos=True,
        chat_template="{{ x }}",
    )


def test_gguf_without_special_tokens_has_none() -> None:
    assert text_facts_from_gguf(gguf_metadata(INNER, "gpt-2")) == TextFacts(None, (), None, None)
    with pytest.raises(ModelError, match="no tokenizer"):
        text_facts_from_gguf({})


def test_a_folders_end_tokens_are_merged_from_all_its_files(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None, "add_bos_token": False},
        special_tokens_map={"unk_token": "<|endoftext|>", "eos_token": "ignored"},
        config={"bos_token_id": 7, "eos_token_id": [4, 1]},
        generation_config={"eos_token_id": [2, 4]},
    )
    assert text_facts_from_folder(folder) == TextFacts(3, (2, 4, 1), "<s>", "</s>", {"unk_token": "<|endoftext|>"})


def test_a_bare_folder_goes_by_the_ids_of_its_config(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"text_config": {"bos_token_id": 3, "eos_token_id": 4}})
    facts = text_facts_from_folder(folder)
    assert (facts.bos_token_id, facts.bos_token, facts.eos_token_ids, facts.eos_token) == (3, None, (4,), "</s>")


def test_a_tokenizer_that_puts_bos_first_says_so(tmp_path: Path) -> None:
    inner = original([WORDS])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    folder = folder_of(tmp_path, tokenizer_config={"bos_token": "<s>"})
    assert not text_facts_from_folder(folder).add_bos
    (folder / "tokenizer.json").write_text(inner.to_str())
    assert text_facts_from_folder(folder).add_bos


def test_a_folder_whose_decoder_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    document = json.loads(INNER.to_str())
    document["decoder"] = {"type": "Sequence", "decoders": [document["decoder"], {"type": "Strip", "content": " ", "start": 1, "stop": 1}]}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="ByteLevel, Strip"):
        text_facts_from_folder(folder)


def test_a_template_in_a_file_of_its_own_goes_first_and_default_is_picked_by_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "inline"}]
    folder = folder_of(tmp_path, tokenizer_config={"chat_template": named})
    assert text_facts_from_folder(folder).chat_template == "inline"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert text_facts_from_folder(folder).chat_template == "processor"
    (folder / "chat_template.jinja").write_text("file")
    assert text_facts_from_folder(folder).chat_template == "file"


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert text_facts_from_folder(folder_of(tmp_path)).chat_template is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_bytes(b"\xff{")
    with pytest.raises(ModelError, match=name):
        text_facts_from_folder(folder)
