"""Stops by text and by id, decided one token at a time. The byte tokenizer: a token is a byte."""

import pytest

from byte_model import IM_END
from sterna.protocol.finish import FinishLength, FinishMatchedStr, FinishMatchedToken
from unit.scheduler.harness import Harness

pytestmark = pytest.mark.usefixtures("either_way")


def run(text: bytes, max_new_tokens: int | None = None, **params: object) -> Harness:
    h = Harness()
    h.send("a", list(text), max_new_tokens or len(text), **params)  # type: ignore[arg-type]
    h.run()
    h.assert_at_baseline()
    return h


def test_a_stop_over_many_tokens_ends_the_request_where_it_completes() -> None:
    h = run(b"one two three", stop=("two",))
    assert h.reason("a") == FinishMatchedStr("two", 6, 4)
    assert h.output("a") == list(b"one two")


def test_offsets_count_characters_and_tokens_count_bytes() -> None:
    h = run("äöü世!x".encode(), stop=("!",))
    assert h.reason("a") == FinishMatchedStr("!", 9, 4)


def test_of_stops_that_complete_together_the_one_that_begins_first_wins() -> None:
    assert run(b"abcdef", stop=("cd", "bcd", "d")).reason("a") == FinishMatchedStr("bcd", 3, 1)


def test_requests_with_different_stops_are_independent() -> None:
    h = Harness()
    for i, stop in enumerate("edcba"):
        h.send(f"r{i}", list(b"abcde"), 5, stop=(stop,))
    h.run()
    assert [len(h.output(f"r{i}")) for i in range(5)] == [5, 4, 3, 2, 1]


def test_a_stop_string_goes_before_an_end_token_and_an_end_token_before_length() -> None:
    assert run(b"abc", stop=("c",), stop_token_ids=(ord("c"),)).reason("a") == FinishMatchedStr("c", 2, 2)
    assert run(b"abc", 3, stop_token_ids=(ord("c"),)).reason("a") == FinishMatchedToken(ord("c"), False)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_stop_in_text_that_was_held_is_found_when_the_length_ends_it(split: int) -> None:
    """The output breaks off inside a character: what the decoder held comes out as U+FFFD, which is the stop."""
    text = b"ab" + "😀".encode()[:split]
    h = run(text, len(text), stop=("\ufffd",))
    assert h.reason("a") == FinishMatchedStr("\ufffd", len(text) - 1, 2)


def test_min_new_tokens_holds_text_stops_off_and_a_later_one_counts() -> None:
    h = run(b"x.y.z.", stop=(".",), min_new_tokens=3)
    assert h.reason("a") == FinishMatchedStr(".", 3, 3)
    assert run(b"x.yyy", 5, stop=(".",), min_new_tokens=5).reason("a") == FinishLength(5)


def test_a_stop_begun_while_held_off_and_completed_after_counts() -> None:
    assert run(b"xabcd", stop=("abc",), min_new_tokens=3).reason("a") == FinishMatchedStr("abc", 3, 1)


def test_a_stop_that_is_one_special_token_stops_by_id_though_it_leaves_no_text() -> None:
    h = Harness(eos=())
    h.send("a", [97, 98, IM_END, 99], 9, stop=("<|im_end|>",))
    h.run()
    assert h.reason("a") == FinishMatchedToken(IM_END, False)
    assert h.output("a") == [97, 98, IM_END]


def test_a_special_token_that_is_shown_stops_by_its_text() -> None:
    h = Harness(eos=())
    h.send("a", [97, 98, IM_END, 99], 9, stop=("<|im_end|>",), skip_special_tokens=False)
    h.run()
    assert h.reason("a") == FinishMatchedStr("<|im_end|>", 2, 2)


def test_the_tokenizer_is_not_loaded_for_requests_without_text_stops() -> None:
    h = Harness()
    h.send("a", list(b"abc"), 3, stop_token_ids=(1,))
    h.run()
    assert h.tokenizers_loaded == 0


def test_stop_state_survives_retraction() -> None:
    h = Harness(max_total_tokens=160, radix_cache=False)
    h.scheduler.prefill.ratio.value = 0.0
    texts = {f"r{i}": [65 + i] * 15 + [90] for i in range(4)}
    for rid, prompt in texts.items():
        stop = bytes(prompt[-2:] + prompt[:1]).decode()  # spans two rounds of the echo
        h.send(rid, [*prompt[:1] * 50, 90], 200, stop=(stop + prompt[:1][0].to_bytes().decode(),))
    h.run()
    assert h.outbox.stats is not None
    assert h.outbox.stats.retractions_total > 0
    for rid, prompt in texts.items():
        char = chr(prompt[0])
        assert h.reason(rid) == FinishMatchedStr(f"{char}Z{char}{char}", 52, 49)
    h.assert_at_baseline()


def test_resumed_outputs_count_for_a_stop_that_spans_them() -> None:
    h = Harness()
    h.send("a", list(b"abcdef"), 6, stop=("cd",), resume=list(b"abc"))
    h.run()
    assert h.reason("a") == FinishMatchedStr("cd", 3, 2)
    assert (h.outbox.rows["a"][0].start, h.output("a")) == (3, list(b"d"))


@pytest.mark.parametrize(("text", "resumed"), [("äbcdef", 3), ("ä世cdef", 4), ("abcdef", 0), ("abcdef", 5)])
def test_a_stop_is_where_it_would_be_had_the_request_not_been_interrupted(text: str, resumed: int) -> None:
    """`resumed` counts bytes, which are tokens: it may end inside a character, or inside the stop."""
    h = Harness()
    ids = list(text.encode())
    h.send("a", ids, len(ids), stop=("def",), resume=ids[:resumed], resume_chars=1)
    h.run()
    opening = h.outbox.rows["a"][0].opening
    assert opening is not None
    assert (opening.prompt_tail, opening.resume_output_ids, opening.resume_chars) == (ids, ids[:resumed], 1)
    assert h.reason("a") == FinishMatchedStr("def", len(ids) - 1, text.index("def"))


def test_bytes_that_never_become_a_character_count_though_a_request_resumes_after_them() -> None:
    ids = [97, 0xE4, 98, 99, 100]
    for resumed in range(5):
        h = Harness()
        h.send("a", ids, 5, stop=("cd",), resume=ids[:resumed])
        h.run()
        assert h.reason("a") == FinishMatchedStr("cd", 4, len("a\ufffdb")), resumed
