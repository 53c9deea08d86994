"""What a template puts after an answer is what it puts there in the whole conversation."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from sterna.errors import InvalidRequest
from sterna.text import tokenizer as text_tokenizer
from sterna.text.chat_template import ChatTemplate
from sterna.text.chat_turn import render_turn
from sterna.tokenizer_manager.tokenize import encode_after_answer, leading_bos
from unit.text.templates import PARTS_TEMPLATES, TEXT_TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ALL = TEXT_TEMPLATES | PARTS_TEMPLATES
TEMPLATES = {name: ALL[name] for name in ("chatml", "llama3", "mistral", "qwen25", "qwen3", "zephyr", "gemma")}
MOVES_SYSTEM = {"mistral"}
"""Puts the system prompt into the last user message, wherever that is by now."""
ANSWER = "Because of the air."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"bos_token": "<x>", "date_string": "today"}], ids=str)
def test_the_parts_make_the_whole_conversation(name: str, history: int, options: dict[str, object]) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    before = [user("Why?"), said("So."), user("And?")][: 2 * history - 1]
    asked = template.render(before, **{**options, "add_generation_prompt": True})
    whole = template.render([*before, said(ANSWER), user("Sure?")], **options)
    turn = render_turn(template, [user("Sure?")], **options)
    assert whole.startswith(asked)
    assert whole.endswith(ANSWER + turn)
    assert whole[len(asked) : -len(ANSWER + turn)].strip() == ""  # a space that the model would have written itself
    assert "Why?" not in turn


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in MOVES_SYSTEM])
def test_a_system_prompt_is_not_repeated(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        whole = template.render([{"role": "system", "content": "BRIEF"}, user("Why?"), said(ANSWER), user("Sure?")])
    except InvalidRequest:
        return  # this model knows no system prompt
    turn = render_turn(template, [user("Sure?")])
    assert whole.endswith(ANSWER + turn)
    assert "BRIEF" not in turn


def test_a_last_message_can_be_continued() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], TOKENS)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    whole = template.render([user("Why?"), said(ANSWER), user("Sure?"), said("I am")], **options)
    turn = render_turn(template, [user("Sure?"), said("I am")], **options)
    assert whole.endswith(ANSWER + turn)
    assert turn.endswith("I am")


def test_a_template_s_refusal_is_the_turn_s() -> None:
    template = ChatTemplate(TEMPLATES["mistral"], TOKENS)
    with pytest.raises(InvalidRequest, match="must alternate"):
        render_turn(template, [user("one"), user("two")])


HOISTS = """\
{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}
{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


def test_a_message_that_the_template_moves_to_the_front_is_refused_rather_than_lost() -> None:
    template = ChatTemplate(HOISTS, TOKENS)
    assert render_turn(template, [user("hi")]) == "<user>hi"
    with pytest.raises(InvalidRequest, match="before the conversation's end") as caught:
        render_turn(template, [{"role": "system", "content": "new"}, user("hi")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
    ids=["hidden", "twice", "changed"],
)
def test_a_template_that_does_not_show_an_answer_once_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="doesn't show an answer"):
        render_turn(ChatTemplate(source, TOKENS), [user("hi")])


# ---- ids ----

PIECES = ["\u2581", "\u2581\u2581", *"abcdefgx[]/.", "\u2581a", "\u2581[", "ab", "\n", "x.\n"]


def tokenizer(kind: str) -> text_tokenizer.Tokenizer:
    """Three ways in which SentencePiece's space in front came down to us; `</s>` and `<s>` are special."""
    inner = Tokenizer(models.Unigram([("<unk>", -20.0), *((piece, -float(10 - len(piece))) for piece in PIECES)], 0, False))
    if kind == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return text_tokenizer.Tokenizer(inner)


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "never"])
@pytest.mark.parametrize("turn", ["</s><s>[a] b[/a]", " </s><s>[a] b[/a]", "\n[a]"])
def test_a_turn_has_the_ids_that_it_has_in_the_whole_text(kind: str, turn: str) -> None:
    made = tokenizer(kind)
    for answer in ("ab", "ab.", "c</s>[a]g"):
        before = made.encode("<s>[a] a[/a] " + answer, add_special_tokens=False)
        whole = made.encode("<s>[a] a[/a] " + answer + turn, add_special_tokens=False)
        assert before + encode_after_answer(made, turn) == whole


def test_encoded_alone_it_would_have_others() -> None:
    made = tokenizer("prepend")
    assert made.encode(" </s>", add_special_tokens=False) != encode_after_answer(made, " </s>")


def test_what_would_melt_into_the_answer_is_encoded_alone() -> None:
    made = tokenizer("never")
    assert made.encode("x.\na", add_special_tokens=False)[0] == made.token_to_id("x.\n")
    assert encode_after_answer(made, ".\na") == made.encode(".\na", add_special_tokens=False)


def test_a_bos_is_what_the_tokenizer_puts_there_or_no_template_spells_out() -> None:
    made = tokenizer("first")
    bos = made.token_to_id("<s>")
    assert leading_bos(made, bos, "{{ bos_token }}") == bos
    assert leading_bos(made, bos, "{{ '<s>' + message.role }}") is None
    assert leading_bos(made, None, "") is None
    made._inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert leading_bos(made, bos, "{{ '<s>' + message.role }}") == bos
