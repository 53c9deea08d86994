"""Hop 7: text leaves once, whole characters only, and never a byte of a stop that matched."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_model import EOS, tokenizer_json
from sterna.detokenizer.manager import DetokenizerManager
from sterna.protocol.control import DecodeRefused
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.protocol.generate import BatchStrOutput, BatchTokenIDOutput, DecodeOpening, StrRow, TokenIDRow
from sterna.protocol.logprobs import TokenLogprobs
from sterna.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_json(tokenizer_json())


def opening(stop: tuple[str, ...] = (), **fields: Any) -> DecodeOpening:
    values = {
        "prompt_tail": list(b"prompt"),
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "stop": stop,
        "reply_to": "server",
        "prompt_tokens": 6,
        "cached_tokens": 2,
    }
    return DecodeOpening(**(values | fields))


def batch(*rows: TokenIDRow, epoch: int = 1) -> BatchTokenIDOutput:
    return BatchTokenIDOutput(epoch=epoch, rows=list(rows))


def new_manager(max_states: int = 16) -> DetokenizerManager:
    return DetokenizerManager(TOKENIZER, max_states)


def rows_of(manager: DetokenizerManager, message: BatchTokenIDOutput) -> list[StrRow]:
    return [row for _, output in manager.to_str_output(message) if isinstance(output, BatchStrOutput) for row in output.rows]


def stream(text: bytes, cuts: list[int], reason: FinishReason, first: DecodeOpening) -> list[str]:
    """The deltas of one request whose tokens are `text`, sent in rows that end at `cuts`."""
    manager = new_manager()
    deltas: list[str] = []
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        last = index == len(edges) - 2
        row = TokenIDRow("r", start, list(text[start:end]), reason if last else None, first if index == 0 else None)
        deltas += [out.output_str for out in rows_of(manager, batch(row))]
    assert manager.num_states == 0
    return deltas


def test_a_request_opens_streams_and_ends() -> None:
    manager = new_manager()
    (first,) = rows_of(manager, batch(TokenIDRow("r", 0, list(b"ab"), None, opening())))
    assert (first.output_str, first.output_ids, first.prompt_tokens, first.cached_tokens) == ("ab", list(b"ab"), 6, 2)
    (last,) = rows_of(manager, batch(TokenIDRow("r", 2, list(b"c"), FinishLength(3))))
    assert (last.output_str, last.finished_reason) == ("c", FinishLength(3))
    assert manager.num_states == 0


@given(st.lists(st.integers(0, 100), max_size=8), st.sampled_from(["", "tail", "世界", "END"]))
def test_no_byte_of_a_matched_stop_leaves_however_the_rows_are_cut(cuts: list[int], after: str) -> None:
    """`after` stands for the rest of the token that completes the stop: it comes in the row of the ending."""
    text = "some 世界 text " + "END"
    reason = FinishMatchedStr("END", 0, text.index("END"))
    cuts = [cut % len(text.encode()) for cut in cuts]
    deltas = stream((text + after).encode(), cuts, reason, opening(("END", "never")))
    assert "".join(deltas) == "some 世界 text "
    assert not any("�" in delta for delta in deltas)


@given(st.lists(st.integers(0, 100), max_size=8))
def test_a_stop_that_only_began_is_flushed_at_the_end(cuts: list[int]) -> None:
    text = "almost EN"
    assert "".join(stream(text.encode(), cuts, FinishLength(9), opening(("END",)))) == text


def test_what_could_become_a_stop_is_held_until_it_can_not() -> None:
    manager = new_manager()
    rows = [TokenIDRow("r", 0, list(b"xE"), None, opening(("END",))), TokenIDRow("r", 2, list(b"N")), TokenIDRow("r", 3, list(b"Z"))]
    assert [row.output_str for message in rows for row in rows_of(manager, batch(message))] == ["x", "", "ENZ"]


def test_logprobs_pass_with_their_tokens_though_text_is_held_back() -> None:
    manager = new_manager()
    each = [TokenLogprobs.pack(-float(index), [index], [-0.5], [-2.0]) for index in range(3)]
    rows = rows_of(manager, batch(TokenIDRow("r", 0, list(b"EN"), opening=opening(("END",)), logprobs=each[:2])))
    rows += rows_of(manager, batch(TokenIDRow("r", 2, list(b"D"), FinishMatchedStr("END", 2, 0), logprobs=each[2:])))
    assert [(row.output_str, row.logprobs) for row in rows] == [("", each[:2]), ("", each[2:])]


def test_an_untrimmed_stop_is_the_last_text() -> None:
    reason = FinishMatchedStr("END", 5, 2)
    assert "".join(stream(b"abENDxyz", [], reason, opening(("END",), no_stop_trim=True))) == "abEND"


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "ab"), (True, "ab!")])
def test_a_stop_token_shows_only_when_asked(no_stop_trim: bool, text: str) -> None:
    reason = FinishMatchedToken(ord("!"), False)
    assert "".join(stream(b"ab!", [], reason, opening(no_stop_trim=no_stop_trim))) == text


def test_an_end_token_that_is_special_shows_only_unskipped_and_untrimmed() -> None:
    def text(**fields: Any) -> str:
        row = TokenIDRow("r", 0, [97, EOS], FinishMatchedToken(EOS, True), opening(**fields))
        return rows_of(new_manager(), batch(row))[0].output_str

    assert text() == "a"
    assert text(no_stop_trim=True) == "a"
    assert text(skip_special_tokens=False) == "a"
    assert text(skip_special_tokens=False, no_stop_trim=True) == "a<|eos|>"


def test_an_abort_does_not_overtake_text_already_produced() -> None:
    reason = FinishAbort("aborted", 499, "aborted")
    assert "".join(stream(b"text EN", [], reason, opening(("END",)))) == "text EN"


def test_a_request_that_finds_no_room_is_refused_at_its_start_and_the_others_go_on() -> None:
    manager = new_manager(max_states=1)
    rows_of(manager, batch(TokenIDRow("one", 0, [97], None, opening())))
    out = list(manager.to_str_output(batch(TokenIDRow("two", 0, [98], None, opening()), TokenIDRow("one", 1, [99]))))
    assert ("server", DecodeRefused(rid="two", epoch=1)) in out
    assert [row.rid for _, message in out if isinstance(message, BatchStrOutput) for row in message.rows] == ["one"]
    assert rows_of(manager, batch(TokenIDRow("two", 1, [98]))) == []
    (end,) = rows_of(manager, batch(TokenIDRow("two", 2, [98], FinishAbort("aborted", 499, "aborted"))))
    assert isinstance(end.finished_reason, FinishAbort)
    assert (end.finished_reason.status_code, end.output_ids, end.output_str) == (429, [], "")


def test_a_row_seen_already_and_one_of_an_older_epoch_are_dropped() -> None:
    manager = new_manager()
    rows_of(manager, batch(TokenIDRow("r", 0, [97, 98], None, opening()), epoch=2))
    assert rows_of(manager, batch(TokenIDRow("r", 0, [97, 98], None), epoch=2)) == []
    assert rows_of(manager, batch(TokenIDRow("r", 2, [99], None), epoch=1)) == []
    assert [row.output_str for row in rows_of(manager, batch(TokenIDRow("r", 2, [99], None), epoch=2))] == ["c"]


def test_a_gap_refuses_its_rid_and_no_other() -> None:
    manager = new_manager()
    rows_of(manager, batch(TokenIDRow("a", 0, [97], None, opening()), TokenIDRow("b", 0, [97], None, opening())))
    out = list(manager.to_str_output(batch(TokenIDRow("a", 2, [97]), TokenIDRow("b", 1, [98]))))
    assert ("server", DecodeRefused(rid="a", epoch=1)) in out
    assert [row.output_str for _, message in out if isinstance(message, BatchStrOutput) for row in message.rows] == ["b"]
    (end,) = rows_of(manager, batch(TokenIDRow("a", 3, [97], FinishLength(4))))
    assert isinstance(end.finished_reason, FinishAbort)
    assert end.finished_reason.status_code == 500


def test_a_refusal_before_any_token_ends_at_once() -> None:
    manager = new_manager()
    reason = FinishAbort("The request queue is full.", 429, "queue_full")
    (row,) = rows_of(manager, batch(TokenIDRow("r", 0, [], reason, opening())))
    assert (row.finished_reason, row.output_str) == (reason, "")
    assert manager.num_states == 0


def test_rows_go_to_the_server_that_asked() -> None:
    manager = new_manager()
    rows = [TokenIDRow(rid, 0, [97], None, opening(reply_to=rid)) for rid in ("one", "two", "three")]
    out = list(manager.to_str_output(batch(*rows)))
    assert [(address, [row.rid for row in message.rows]) for address, message in out if isinstance(message, BatchStrOutput)] == [
        ("one", ["one"]),
        ("two", ["two"]),
        ("three", ["three"]),
    ]


def test_one_request_that_cannot_be_decoded_leaves_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = new_manager()
    rows_of(manager, batch(*(TokenIDRow(rid, 0, [97], None, opening()) for rid in "ab")))
    manager._decodings["a"].status = None  # type: ignore[assignment]
    out = list(manager.to_str_output(batch(TokenIDRow("a", 1, [98]), TokenIDRow("b", 1, [98]))))
    assert ("server", DecodeRefused(rid="a", epoch=1)) in out
    assert [(row.rid, row.output_str) for _, m in out if isinstance(m, BatchStrOutput) for row in m.rows] == [("b", "b")]


def test_a_fault_after_decoding_refuses_its_rid_and_no_other() -> None:
    manager = new_manager()
    rows_of(manager, batch(*(TokenIDRow(rid, 0, [97], None, opening(("stop",))) for rid in "ab")))
    manager._decodings["a"].matcher = "no matcher"  # type: ignore[assignment]
    out = list(manager.to_str_output(batch(TokenIDRow("a", 1, [98]), TokenIDRow("b", 1, [98]))))
    assert ("server", DecodeRefused(rid="a", epoch=1)) in out
    assert [(row.rid, row.output_str) for _, m in out if isinstance(m, BatchStrOutput) for row in m.rows] == [("b", "b")]


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "cd"), (True, "cdEND")])
def test_a_resumed_requests_stop_is_cut_where_it_would_be_had_nothing_happened(no_stop_trim: bool, text: str) -> None:
    first = opening(("END",), resume_output_ids=list(b"ab"), resume_chars=2, no_stop_trim=no_stop_trim)
    assert "".join(stream(b"cdENDxyz", [1, 4], FinishMatchedStr("END", 8, len("abcd")), first)) == text


HARD = "ab\u0000世界 STO STOP" + "👩‍👩‍👧 ST"
"""Characters of one to four bytes, and beginnings of the stop: some that aren't, one at the end."""


@given(st.integers(0, len(HARD.encode())), st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_a_request_that_resumes_anywhere_sends_what_was_missing_and_nothing_twice(at: int, cuts: list[int], with_stop: bool) -> None:
    """A detokenizer dies after `at` tokens were accepted, with text held back or a character half done; another one goes on."""
    text = HARD.encode()
    first = opening(("STOPPED", "no")) if with_stop else opening()
    manager = new_manager()
    sent = "".join(row.output_str for row in rows_of(manager, batch(TokenIDRow("r", 0, list(text[:at]), None, first))))
    resumed = opening(first.stop, resume_output_ids=list(text[:at]), resume_chars=len(sent))
    rest = text[at:]
    manager = new_manager()
    edges = [0, *sorted({cut % (len(rest) + 1) for cut in cuts}), len(rest)]
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        reason = FinishLength(len(text)) if index == len(edges) - 2 else None
        row = TokenIDRow("r", at + start, list(rest[start:end]), reason, resumed if index == 0 else None)
        (out,) = rows_of(manager, batch(row, epoch=2))
        sent += out.output_str
    assert sent == HARD


def test_a_journal_with_more_text_than_there_is_is_refused_and_never_repeated_from() -> None:
    manager = new_manager()
    first = opening(resume_output_ids=list(b"ab"), resume_chars=3)
    assert list(manager.to_str_output(batch(TokenIDRow("r", 2, list(b"c"), None, first)))) == [("server", DecodeRefused(rid="r", epoch=1))]


def test_a_new_epoch_forgets_what_the_one_before_left_open() -> None:
    """A scheduler that died ends nothing any more."""
    manager = new_manager(max_states=2)
    rows_of(manager, batch(TokenIDRow("gone", 0, [97], None, opening()), TokenIDRow("resumes", 0, [97], None, opening())))
    resumed = opening(resume_output_ids=[97], resume_chars=1)
    (row,) = rows_of(manager, batch(TokenIDRow("resumes", 1, [98], None, resumed), epoch=2))
    assert (row.start, row.output_str, manager.num_states) == (1, "b", 1)
    assert rows_of(manager, batch(TokenIDRow("gone", 1, [98]), epoch=1)) == []
    assert manager.num_states == 1
