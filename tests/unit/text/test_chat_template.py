"""Rendering equals transformers' `apply_chat_template`, template by template; what can't be rendered is refused with the reason."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from sterna.config.model_config import ModelConfig
from sterna.errors import InvalidRequest, ModelError
from sterna.text import chat_template
from sterna.text.chat_template import ChatTemplate
from unit.text.templates import CHATML, GEMMA, MISTRAL, PARTS_TEMPLATES, TEXT_TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = TEXT_TEMPLATES | PARTS_TEMPLATES

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": "What is 世界 <b>&amp;</b>?  "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThe world. ", "name": None}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": [1, None, True]}}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
THOUGHT = {"role": "assistant", "reasoning": "because", "content": "So."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "«look»", "parameters": {"type": "object", "properties": {}}}}]

CHATS = {
    "one turn": [USER],
    "system first": [SYSTEM, USER],
    "system second": [USER, SYSTEM],
    "many turns": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "tool call": [USER, CALL, RESULT, USER],
    "reasoning": [USER, THOUGHT],
    "empty content": [{"role": "user", "content": ""}],
}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """transformers' rendering; None where it raises."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    reference = PreTrainedTokenizerFast(tokenizer_object=inner, **TOKENS)
    try:
        rendered = reference.apply_chat_template(copy.deepcopy(messages), chat_template=source, tokenize=False, **options)
    except Exception:
        return None
    assert isinstance(rendered, str)
    return rendered


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    before = copy.deepcopy(messages)
    rendered: str | None
    try:
        rendered = ChatTemplate(source, TOKENS).render(messages, **options)
    except InvalidRequest:
        rendered = None
    assert messages == before
    return rendered


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_rendering_equals_transformers(name: str, chat: str) -> None:
    options: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False, "date_string": "today", "bos_token": "<x>"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]
    for option in options:
        assert ours(TEMPLATES[name], CHATS[chat], **option) == theirs(TEMPLATES[name], CHATS[chat], **option)


def test_the_comparison_sees_both_texts_and_refusals() -> None:
    outcomes = [ours(source, chat) for source in TEMPLATES.values() for chat in CHATS.values()]
    assert outcomes.count(None) >= 3
    assert len(set(outcomes)) > 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_iterates_over_parts_gets_parts_and_any_other_gets_text(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    assert template.takes_parts == (name in PARTS_TEMPLATES)
    text = template.render([PARTS], add_generation_prompt=False)
    as_parts = theirs(TEMPLATES[name], [PARTS])
    joined = theirs(TEMPLATES[name], [{"role": "user", "content": "one \ntwo"}])
    assert text == (as_parts if template.takes_parts else joined)


def test_parts_of_a_system_message_are_joined_for_a_template_that_concatenates() -> None:
    parts = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    template = ChatTemplate(CHATML, TOKENS)
    assert template.render([parts, USER]) == template.render([{"role": "system", "content": "Be brief."}, USER])


def test_a_part_that_is_not_text_is_refused_where_text_is_needed() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(InvalidRequest, match="text parts"):
        ChatTemplate(CHATML, TOKENS).render([image])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", ["unfinished", "trailing space ", " \n"])
def test_continuing_the_final_message_equals_transformers(name: str, end: str) -> None:
    chat = [USER, {"role": "assistant", "content": end}]
    option = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours(TEMPLATES[name], chat, **option) == theirs(TEMPLATES[name], chat, **option)


def test_continuing_the_final_message_ends_with_it() -> None:
    chat = [USER, {"role": "assistant", "content": "The world is"}]
    assert ChatTemplate(CHATML, TOKENS).render(chat, add_generation_prompt=False, continue_final_message=True).endswith("The world is")


@pytest.mark.parametrize("chat", [[], [CALL], [{"role": "assistant", "content": []}]])
def test_there_must_be_a_text_to_continue(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="continue"):
        ChatTemplate(GEMMA, TOKENS).render(chat, add_generation_prompt=False, continue_final_message=True)


def test_continuing_and_prompting_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="exclude"):
        ChatTemplate(CHATML, TOKENS).render([USER], continue_final_message=True)


def test_a_template_that_raises_is_refused_with_its_text() -> None:
    with pytest.raises(InvalidRequest, match=r"^After the optional system message, conversation roles must alternate") as refusal:
        ChatTemplate(MISTRAL, TOKENS).render([USER, USER])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ a b }}", "{% unknown %}", "{{ x | nofilter }}"])
def test_a_template_that_does_not_compile_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match="compile"):
        ChatTemplate(source, TOKENS)


class TestLimits:
    LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"
    RECURSION = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"

    def test_a_loop_without_output_ends_at_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.05)
        with pytest.raises(InvalidRequest, match="took more than"):
            ChatTemplate(self.LOOPS, TOKENS).render([USER])

    def test_output_without_end_is_refused_at_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
        with pytest.raises(InvalidRequest, match="more than 1000 characters"):
            ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}ab{% endfor %}{% endfor %}", TOKENS).render([USER])

    @pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 9 }}", "{{ 10 ** 9 * [1] }}", "{{ 9 ** 999999999 }}"])
    def test_something_huge_is_not_made(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="huge"):
            ChatTemplate(source, TOKENS).render([USER])

    @pytest.mark.parametrize("source", [RECURSION, "{{ messages.append(1) }}", "{{ messages.__class__.__mro__ }}", "{{ 'a' + 1 }}"])
    def test_whatever_a_template_does_wrong_is_a_refusal(self, source: str) -> None:
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, TOKENS).render([USER])


def test_one_template_renders_in_many_threads_at_once() -> None:
    template = ChatTemplate(CHATML, TOKENS)
    chats = [[{"role": "user", "content": str(i)}] for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(template.render, chats)) == [template.render(chat) for chat in chats]


def test_a_folders_template_names_the_models_tokens(tmp_path: Path) -> None:
    facts = {
        "name": "m", "source": "s", "family": "llama", "weights_dtype": "F32", "num_parameters": 1, "vocab_size": 4, "context_len": 8,
        "bos_token_id": 1, "eos_token_ids": [2], "bos_token": "<s>", "eos_token": "</s>", "template_tokens": {"pad_token": "<p>"},
    }  # fmt: skip
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    model = ModelConfig.load(tmp_path)
    assert ChatTemplate.load(tmp_path, model) is None
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    template = ChatTemplate.load(tmp_path, model)
    assert template is not None
    assert template.render([USER]) == "<s></s><p>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.load(tmp_path, model)
