"""The text that leaves piece by piece is the one-shot text, whatever the pieces.

The oracle is the library's one-shot decode of all ids, which shares no code with the tables that the product decodes by.
"""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sterna.text.incremental import PROMPT_TAIL_TOKENS, DecodeStatus, prompt_tail_of, push_batch
from sterna.text.token_text import ByteTable, PieceTable, WindowTable
from sterna.text.tokenizer import Tokenizer
from unit.text.vocabularies import ALL, MARK, PIECES

names = st.sampled_from(sorted(ALL))
flags = st.booleans()


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, rich in bytes that make up whole characters, and in ids beyond the vocabulary."""
    any_id = st.integers(0, tokenizer.vocab_size + 3)
    one = st.lists(any_id, max_size=4)
    spelled = st.sampled_from("世é👩ก🏽\u200d\ufffda ").map(lambda char: [byte_id(tokenizer, byte) for byte in char.encode()])
    return st.lists(st.one_of(one, spelled, spelled), max_size=8).map(lambda parts: [i for part in parts for i in part])


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """A token of this one byte: the vocabularies list them in order, from 0 or after <unk>."""
    return byte + (0 if isinstance(tokenizer.table(skip_special_tokens=False), ByteTable) else 1)


def pushed(tokenizer: Tokenizer, tail: list[int], pieces: list[list[int]], skip: bool) -> str:
    status = DecodeStatus(tokenizer, tail, skip_special_tokens=skip)
    texts = [status.push(piece) for piece in pieces]
    texts.append(status.finish())
    assert status.sent_offset == sum(map(len, texts))
    assert status.read_offset == len(prompt_tail_of(tokenizer, tail)) + sum(map(len, pieces))
    return "".join(texts)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    at = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[a:b] for a, b in pairwise(at)]


@given(st.data(), names, flags)
def test_joined_pushes_are_the_one_shot_text_for_every_split(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = ALL[name]
    ids = data.draw(ids_of(tokenizer))
    pieces = split(ids, data.draw(st.lists(st.integers(0, 40))))
    assert pushed(tokenizer, [], pieces, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.data(), names, flags)
def test_text_after_a_prompt_is_the_whole_text_minus_the_prompts(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = ALL[name]
    tail, ids = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    pieces = split(ids, data.draw(st.lists(st.integers(0, 40))))
    before = tokenizer.decode(tail, skip_special_tokens=skip)
    whole = tokenizer.decode(tail + ids, skip_special_tokens=skip)
    text = pushed(tokenizer, tail, pieces, skip)
    assert whole.endswith(text)
    if whole.startswith(before):
        assert text == whole[len(before) :] or before.endswith("\ufffd")
    # A prompt that ends inside a character: however it goes on, nothing is lost of what the whole text has more.
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    if isinstance(tokenizer.table(skip_special_tokens=skip), ByteTable | WindowTable):
        assert text == whole[common:]


@given(st.data(), names, flags)
def test_the_text_does_not_depend_on_the_split(data: st.DataObject, name: str, skip: bool) -> None:
    tokenizer = ALL[name]
    tail, ids = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    pieces = split(ids, data.draw(st.lists(st.integers(0, 40))))
    assert pushed(tokenizer, tail, pieces, skip) == pushed(tokenizer, tail, [ids], skip)


@given(st.data(), names, st.lists(flags, min_size=1, max_size=5))
def test_a_batch_gives_each_row_what_it_gives_alone(data: st.DataObject, name: str, skips: list[bool]) -> None:
    tokenizer = ALL[name]
    tails = [data.draw(ids_of(tokenizer)) for _ in skips]
    steps = [[data.draw(ids_of(tokenizer)) for _ in skips] for _ in range(2)]

    def statuses() -> list[DecodeStatus]:
        return [DecodeStatus(tokenizer, tail, skip_special_tokens=skip) for tail, skip in zip(tails, skips, strict=True)]

    together, alone = statuses(), statuses()
    for step in steps:
        assert push_batch(together, step) == [status.push(ids) for status, ids in zip(alone, step, strict=True)]
    assert [status.sent_offset for status in together] == [status.sent_offset for status in alone]


def test_every_kind_of_table_is_tried_here() -> None:
    kinds = {type(tokenizer.table(skip_special_tokens=True)) for tokenizer in ALL.values()}
    assert kinds == {ByteTable, PieceTable, WindowTable}


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
class TestCharactersInBytes:
    def spell(self, name: str, text: str | bytes) -> list[int]:
        return [byte_id(ALL[name], byte) for byte in (text.encode() if isinstance(text, str) else text)]

    def test_a_prompt_that_ends_inside_a_character_gives_the_completed_character_and_what_is_new(self, name: str) -> None:
        tail = self.spell(name, "A 世"[:-1]) + self.spell(name, "世".encode()[:2])
        status = DecodeStatus(ALL[name], tail, skip_special_tokens=True)
        text = status.push(self.spell(name, "世".encode()[2:]))
        assert text + status.push(self.spell(name, "ab")) + status.finish() == "世ab"

    def test_a_prompt_that_ends_inside_a_character_that_nothing_completes_adds_nothing(self, name: str) -> None:
        tail = self.spell(name, "世".encode()[:2])
        assert pushed(ALL[name], tail, [], True) == ""
        a = ALL[name].token_to_id("a")
        assert a is not None
        assert pushed(ALL[name], tail, [[a]], True) == "a"

    def test_the_prompts_whole_characters_are_not_repeated_with_the_completed_one(self, name: str) -> None:
        spelled = self.spell(name, "世世")
        for cut in range(1, len(spelled)):
            assert pushed(ALL[name], spelled[:cut], [spelled[cut:]], True) == ("世世" if cut < 3 else "世")

    def test_tails_that_decode_to_a_replacement_character_in_turn(self, name: str) -> None:
        # A 世� -> A 世a� -> A 世ab
        half = self.spell(name, "世".encode()[:1])
        pieces = [self.spell(name, "A 世") + half, self.spell(name, "a") + half, self.spell(name, "b")]
        ids = [i for piece in pieces for i in piece]
        assert pushed(ALL[name], [], pieces, True) == ALL[name].decode(ids)

    def test_bytes_that_never_form_a_character_leave_at_once_and_nothing_piles_up(self, name: str) -> None:
        status = DecodeStatus(ALL[name], [], skip_special_tokens=True)
        ids = self.spell(name, b"\x96\xff\xc0")
        for _ in range(2000):
            status.push(ids)
            assert status.sent_offset >= status.read_offset - 3
        assert status.read_offset == 6000

    def test_half_a_character_never_leaves(self, name: str) -> None:
        status = DecodeStatus(ALL[name], [], skip_special_tokens=True)
        family = "👩\u200d👩\u200d👧"
        texts = [status.push([i]) for i in self.spell(name, family)]
        assert "\ufffd" not in "".join(texts)
        assert "".join(texts) + status.finish() == family

    def test_a_skipped_token_inside_a_character_does_not_break_it(self, name: str) -> None:
        end = ALL[name].token_to_id("</s>")
        assert end is not None
        first, *rest = self.spell(name, "世")
        assert pushed(ALL[name], [], [[first], [end], rest], True) == "世"
        assert pushed(ALL[name], [], [[first], [end], rest], False) == "\ufffd</s>\ufffd\ufffd"


def test_a_valid_run_of_byte_tokens_is_held_and_a_bad_byte_turns_all_of_it() -> None:
    tokenizer = ALL["sentencepiece"]
    a = tokenizer.token_to_id("a")
    assert a is not None
    run = [byte_id(tokenizer, byte) for byte in "世é".encode()]
    status = DecodeStatus(tokenizer, [], skip_special_tokens=True)
    assert [status.push([i]) for i in run] == [""] * 5
    assert status.read_offset == 0
    assert status.push([a]) == "世éa"
    bad = DecodeStatus(tokenizer, [], skip_special_tokens=True)
    bad.push(run)
    assert bad.push([byte_id(tokenizer, 0xFF)]) == "\ufffd" * 6
    assert bad.push([byte_id(tokenizer, 0x41)]) == "\ufffd"
    assert bad.push([a]) == "a"


def test_only_the_space_at_the_very_start_is_stripped() -> None:
    tokenizer = ALL["sentencepiece"]
    marked = tokenizer.token_to_id(MARK + "a")
    assert marked is not None
    assert pushed(tokenizer, [], [[marked], [marked]], True) == "a a"
    assert pushed(tokenizer, [marked], [[marked]], True) == " a"


@example(runs=[3, 40, 3], more=[])
@given(runs=st.lists(st.integers(0, 70), min_size=1, max_size=3), more=st.lists(st.sampled_from(PIECES)))
def test_a_prompts_tail_does_not_begin_inside_a_character(runs: list[int], more: list[str]) -> None:
    tokenizer = ALL["sentencepiece"]
    a = tokenizer.token_to_id("a")
    assert a is not None
    prompt = [a]
    for characters in runs:
        prompt += [byte_id(tokenizer, byte) for byte in "世".encode() * characters] + [a]
    prompt.pop()
    output = [byte_id(tokenizer, byte) for byte in "界".encode()] + [i for p in more if (i := tokenizer.token_to_id(p)) is not None]
    tail = prompt_tail_of(tokenizer, prompt)
    assert prompt[len(prompt) - len(tail) :] == tail
    assert min(len(prompt), PROMPT_TAIL_TOKENS - 3) <= len(tail) <= PROMPT_TAIL_TOKENS
    assert prompt_tail_of(tokenizer, prompt[-PROMPT_TAIL_TOKENS:]) == tail
    whole, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    assert pushed(tokenizer, prompt, [output], True) == pushed(tokenizer, tail, [output], True) == whole[len(before) :]
