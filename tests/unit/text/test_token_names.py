"""A token's name: its bytes join to the text, and a name says what cannot be shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.text.incremental import DecodeStatus
from sterna.text.token_names import TokenNames
from unit.text.test_incremental import byte_id, ids_of
from unit.text.vocabularies import ALL

JOINABLE = ["byte_level", "sentencepiece", "sentencepiece_unstripped", "metaspace"]
"""Those whose tokens' texts don't depend on their neighbours."""


@given(data=st.data(), name=st.sampled_from(JOINABLE), skip=st.booleans())
def test_the_bytes_of_an_outputs_tokens_join_to_its_text(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = ALL[name]
    names = TokenNames(tokenizer)
    tail = tokenizer.encode("the", add_special_tokens=False)
    ids = data.draw(ids_of(tokenizer))
    joined = bytes(byte for token_id in ids for byte in names.name(token_id, skip_special_tokens=skip).data)
    status = DecodeStatus(tokenizer, tail, skip_special_tokens=skip, spaces_between_special_tokens=True)
    text = status.push(ids) + status.finish()
    # What is no UTF-8: SentencePiece has a U+FFFD for each byte.
    assert joined.decode("utf-8", "replace") == text or (name != "byte_level" and "\ufffd" in text)


@pytest.mark.parametrize("name", ALL)
def test_every_token_of_a_vocabulary_has_a_name_and_no_other_id_has_text(name: str) -> None:
    tokenizer = ALL[name]
    names = TokenNames(tokenizer)
    for token_id in range(tokenizer.vocab_size):
        text, data = names.name(token_id, skip_special_tokens=False)
        assert bytes(data).decode("utf-8", "backslashreplace") == text
        assert (text, data) == names.name(token_id, skip_special_tokens=False)
    for token_id in (-1, tokenizer.vocab_size, 2**31):
        assert names.name(token_id, skip_special_tokens=True) == ("", ())


def test_bytes_that_are_no_utf8_by_themselves_are_escaped() -> None:
    tokenizer = ALL["byte_level"]
    names = TokenNames(tokenizer)
    parts = [names.name(byte_id(tokenizer, byte), skip_special_tokens=True).text for byte in "世a".encode()]
    assert parts == ["\\xe4", "\\xb8", "\\x96", "a"]


@pytest.mark.parametrize("name", ALL)
def test_a_token_that_is_not_shown_is_spelled_out_and_adds_no_bytes(name: str) -> None:
    tokenizer = ALL[name]
    special = tokenizer.token_to_id("</s>")
    assert special is not None
    names = TokenNames(tokenizer)
    assert names.name(special, skip_special_tokens=True) == ("</s>", ())
    assert names.name(special, skip_special_tokens=False) == ("</s>", tuple(b"</s>"))
