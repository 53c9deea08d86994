"""What a turn of a session goes on from, and what keeps it from beginning."""

from collections.abc import Callable

import pytest

from byte_model import BOS, EOS, IM_END
from sterna.errors import (
    ContextLengthExceeded,
    DuplicateRid,
    InvalidRequest,
    RequestError,
    SessionBusy,
    SessionFull,
    SessionNotFound,
    TooManySessions,
)
from sterna.protocol.finish import ABORTED, FAULT, FinishMatchedStr, FinishMatchedToken
from sterna.tokenizer_manager import session, sessions
from unit.tokenizer_manager.session_turns import CONTEXT_LEN, FakeJournal, Group

END = FinishMatchedToken(IM_END, True)


@pytest.fixture
def group() -> Group:
    """One session, with turns a and b: contexts [1, 2, 3, 4] and [1, 2, 3, 4, 5, 6, 7]."""
    made = Group()
    made.open()
    made.turn("a", [1, 2], [3, 4])
    made.turn("b", [5], [6, 7], rid="a")
    return made


def test_a_turn_goes_on_from_the_exact_tokens_of_another(group: Group) -> None:
    assert group.turn("c", [8], [9], rid="b") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert group.turn("d", [10], [], rid="c") == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_branches_share_what_is_before_them_and_nothing_else(group: Group) -> None:
    assert group.turn("c", [8], [9], rid="a") == [1, 2, 3, 4, 8]
    assert group.turn("d", [8], [], rid="c") == [1, 2, 3, 4, 8, 9, 8]
    assert group.turn("e", [8], [], rid="b") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert group.turn("f", [8], []) == [8]


@pytest.mark.parametrize(
    ("params", "context"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"offset": 0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"offset": 7}, [1, 2, 3, 4, 5, 6, 7]),
        ({"offset": 6}, [1, 2, 3, 4, 5, 6]),
        ({"offset": 3}, [1, 2, 3]),
        ({"offset": 1}, [1]),
        ({"offset": -1}, [1, 2, 3, 4, 5, 6]),
        ({"offset": -5}, [1, 2]),
        ({"offset": -7}, []),
        ({"drop_previous_output": True}, [1, 2, 3, 4, 5]),
        ({"drop_previous_output": True, "offset": -2}, [1, 2, 3]),
    ],
)
def test_a_context_is_cut_where_it_is_asked(group: Group, params: dict[str, int], context: list[int]) -> None:
    assert group.turn("c", [8], [9], rid="b", **params) == [*context, 8]
    assert group.turn("d", [10], [], rid="c") == [*context, 8, 9, 10]
    assert group.sessions.num_tokens == 7 + 2 + 1  # what was cut off is b's, and still there
    assert group.turn("e", [8], [], rid="b") == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("offset", [8, -8, 2**31 - 1, -(2**31) + 1])
def test_an_offset_outside_of_the_context_is_refused(group: Group, offset: int) -> None:
    with pytest.raises(InvalidRequest, match="has 7 tokens") as caught:
        group.begin("c", rid="b", offset=offset)
    assert caught.value.param == "session_params.offset"


def test_at_the_beginning_there_is_nothing_to_cut(group: Group) -> None:
    """SGLang's clients send `offset: -1` with every turn, the first one too."""
    assert group.turn("c", [8], [], offset=-1, drop_previous_output=True) == [8]


def test_a_leading_bos_is_dropped_where_something_stands_before_it() -> None:
    group = Group()
    group.open()
    assert group.turn("a", [BOS, 1], [2]) == [BOS, 1]
    assert group.turn("b", [BOS, 3], [4], rid="a") == [BOS, 1, 2, 3]
    assert group.turn("c", [3, BOS], [], rid="a") == [BOS, 1, 2, 3, BOS]
    assert group.turn("d", [BOS, 3], [], rid="a", offset=-3) == [BOS, 3]
    assert group.turn("e", "<|bos|>hi", [], rid="a") == [BOS, 1, 2, *b"hi"]


def test_nothing_new_is_enough_where_something_stands_before_it(group: Group) -> None:
    assert group.turn("c", "", [8], rid="b") == [1, 2, 3, 4, 5, 6, 7]
    (journal,) = group.begin("d")
    with pytest.raises(InvalidRequest, match="holds no token"):
        group.tokenize(journal, "")


@pytest.mark.parametrize(
    ("output", "reason", "context"),
    [
        (b"hello", None, b"hello"),
        ([*b"hello", IM_END], END, b"hello"),
        ([*b"hello", EOS], FinishMatchedToken(EOS, True), b"hello"),
        (b"hello\n", FinishMatchedToken(10, False), b"hello"),
        (b"one. STOP", FinishMatchedStr("STOP", 8, 5), b"one. "),
        (b"STOP", FinishMatchedStr("STOP", 3, 0), b""),
        ("öS".encode(), FinishMatchedStr("S", 2, 1), "ö".encode()),
        ("aö".encode(), FinishMatchedStr("ö", 2, 1), b"a"),
    ],
)
def test_a_chat_goes_on_from_the_answer_without_the_stop_that_ended_it(output: bytes, reason: object, context: bytes) -> None:
    group = Group()
    group.open()
    group.turn("a", "P", list(output), reason)
    assert group.turn("b", "<|im_end|>N", [], rid="a", closes_answer=True) == [*b"P", *context, IM_END, *b"N"]
    assert group.turn("c", "N", [], rid="a") == [*b"P", *output, *b"N"]
    assert group.turn("d", "<|im_end|>", [], rid="a", closes_answer=True, drop_previous_output=True) == [*b"P", IM_END]


@pytest.mark.parametrize("reason", [FinishMatchedToken(10, False), FinishMatchedStr("\n", 1, 1)])
def test_a_stop_that_was_to_stay_in_the_text_stays_in_the_context(reason: object) -> None:
    group = Group()
    group.open()
    group.turn("a", "P", list(b"x\n"), reason, no_stop_trim=True)
    assert group.turn("b", "<|im_end|>", [], rid="a", closes_answer=True) == [*b"Px\n", IM_END]


@pytest.mark.parametrize("reason", [ABORTED, FAULT])
def test_a_turn_that_fails_leaves_the_session_as_it_was(group: Group, reason: object) -> None:
    (journal,) = group.begin("c", rid="b")
    group.tokenize(journal, [8])
    group.end(journal, [9, 9], reason)
    assert group.turn("c2", [10], [], rid="b") == [1, 2, 3, 4, 5, 6, 7, 10]
    with pytest.raises(SessionNotFound, match="go on from turn 'b'") as caught:
        group.begin("d", rid="c")
    assert caught.value.param == "session_params.rid"
    assert group.turn("c", [11], [], rid="b")[-1] == 11  # its name is free again
    assert group.sessions.num_tokens == 7 + 1 + 1


def test_a_turn_whose_reader_has_gone_is_over_at_once(group: Group) -> None:
    (journal,) = group.begin("c", rid="b")
    group.tokenize(journal, [8])
    group.sessions.settle("c", gone=True)
    (again,) = group.begin("d", rid="b")
    assert group.tokenize(again, [9]) == [1, 2, 3, 4, 5, 6, 7, 9]
    group.end(journal, [1], None)  # the engine's last word comes late
    group.sessions.settle("c")
    with pytest.raises(SessionNotFound):
        group.begin("e", rid="c")


def test_one_turn_at_a_time_goes_on_from_one_place(group: Group) -> None:
    group.begin("c", rid="b")
    with pytest.raises(SessionBusy, match="'c' goes on from turn 'b'"):
        group.begin("d", rid="b")
    with pytest.raises(SessionBusy, match="'c' has not finished"):
        group.begin("d", rid="c")
    group.begin("e", rid="a")  # another place
    group.begin("f")
    with pytest.raises(SessionBusy, match="from the beginning"):
        group.begin("g")


def test_members_of_one_request_go_on_from_one_place_each_under_its_own_name(group: Group) -> None:
    journals = group.begin("c 0", "c 1", rid="b")
    assert [group.tokenize(journal, [8 + index])[-2:] for index, journal in enumerate(journals)] == [[7, 8], [7, 9]]
    group.end(journals[0], [10])
    with pytest.raises(SessionBusy):
        group.begin("d", rid="b")
    assert group.turn("e", [11], [], rid="c 0")[-3:] == [8, 10, 11]
    group.fail(journals[1])
    assert group.turn("f", [11], [], rid="b")[-2:] == [7, 11]


def test_a_name_is_used_once(group: Group) -> None:
    with pytest.raises(DuplicateRid):
        group.begin("a", rid="b")
    with pytest.raises(DuplicateRid):
        group.begin("c", "b", rid="b")
    assert group.begin("c", rid="b")  # neither left anything


def test_replace_forgets_what_went_on_from_there(group: Group) -> None:
    group.turn("c", [8], [9], rid="b")
    (running,) = group.begin("d", rid="c")
    assert group.turn("e", [10], [11], rid="a", replace=True) == [1, 2, 3, 4, 10]
    assert group.aborted == ["d"]
    assert group.sessions.num_tokens == 4 + 2
    for gone in ("b", "c", "d"):
        with pytest.raises(SessionNotFound):
            group.begin("f", rid=gone)
    group.end(running, [1], None)
    assert group.turn("b", [12], [], rid="e") == [1, 2, 3, 4, 10, 11, 12]  # a forgotten turn's name is free


@pytest.mark.parametrize("how", ["aborted", "too long", "its client left", "ended by a replace that fails"])
def test_what_a_failed_turn_was_to_replace_is_back(group: Group, how: str) -> None:
    group.turn("c", [8], [9], rid="b")
    held = group.sessions.num_tokens
    (journal,) = group.begin("b", rid="a", replace=True)
    with pytest.raises(SessionBusy, match="being replaced"):
        group.begin("d", rid="c")
    with pytest.raises(DuplicateRid):
        group.begin("c")
    match how:
        case "aborted":
            group.fail(journal)
        case "too long":
            with pytest.raises(ContextLengthExceeded):
                group.tokenize(journal, [1] * 100)
            group.fail(journal)
        case "its client left":
            group.sessions.settle("b", gone=True)
        case _:
            (last,) = group.begin("c", rid="a", replace=True)
            assert group.aborted == ["b"]
            group.fail(last)
    assert group.sessions.num_tokens == held
    assert group.turn("d", [10], [], rid="c") == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_one_answer_of_several_makes_a_replacement_final(group: Group) -> None:
    first, second = group.begin("c", "d", rid="a", replace=True)
    group.fail(first)
    group.tokenize(second, [9])
    group.end(second, [10])
    with pytest.raises(SessionNotFound):
        group.begin("e", rid="b")
    assert group.sessions.num_tokens == 4 + 2
    first, second = group.begin("e", "f", rid="a", replace=True)
    group.fail(first)
    with pytest.raises(SessionBusy):
        group.begin("g", rid="d")
    group.fail(second)
    assert group.turn("g", [11], [], rid="d") == [1, 2, 3, 4, 9, 10, 11]


def test_who_interrupts_a_turn_that_replaces_is_let_in_where_that_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_TURNS", 3)
    group = Group(max_tokens=8)
    group.open()
    group.turn("a", [1, 2, 3], [4])
    group.turn("b", [5], [6, 7, 8], rid="a")
    (running,) = group.begin("c", replace=True)
    group.tokenize(running, [9])
    assert group.turn("a", [10], [], rid="c", replace=True) == [9, 10]
    assert group.sessions.num_tokens == 2


def test_replace_of_everything_begins_again(group: Group) -> None:
    group.begin("c")
    assert group.turn("a", [9], [], replace=True) == [9]
    assert group.aborted == ["c"]
    assert group.sessions.num_tokens == 1


def test_replace_of_a_running_turn_ends_it_and_goes_on_from_what_it_has(group: Group) -> None:
    (running,) = group.begin("c", rid="b")
    with pytest.raises(SessionBusy, match="no tokens yet"):
        group.begin("d", rid="c", replace=True)
    group.tokenize(running, [8])
    running.output_ids += [9, 10]
    (journal,) = group.begin("d", rid="c", replace=True)
    assert group.aborted == ["c"]
    running.output_ids += [11]  # under way when it was cut off
    group.fail(running)
    assert group.tokenize(journal, [12]) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]


def test_an_idle_session_is_forgotten_and_a_busy_one_is_not() -> None:
    group = Group()
    group.open("s")
    group.open("short", timeout=1)
    group.now = 1.0
    with pytest.raises(SessionNotFound) as caught:
        group.begin("a", session="short")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "session_not_found", "session_params.id")
    group.now = 9.0
    (journal,) = group.begin("a")
    group.tokenize(journal, [1])
    group.now = 1000.0
    assert group.sessions.num_open == 1
    group.end(journal, [2])
    group.sessions.settle("a")
    group.now = 1009.0
    assert group.sessions.num_open == 1
    group.turn("b", [3], [], rid="a")
    group.now = 2000.0
    assert group.sessions.num_open == 1  # the turn ended when nobody looked: idle from now on
    group.now = 2010.0
    assert (group.sessions.num_open, group.sessions.num_tokens) == (0, 0)


def test_an_idle_session_is_forgotten_though_nobody_comes() -> None:
    group = Group()
    alarms: list[tuple[float, Callable[[], None]]] = []
    group.sessions._call_later = lambda seconds, act: alarms.append((group.now + seconds, act))
    group.open("s")
    group.turn("a", [1, 2], [3])
    group.open("long", timeout=1000.0)
    while group.sessions._sessions:
        (alarm,) = alarms  # one at a time
        alarms.clear()
        assert alarm[0] - group.now <= sessions.ALARM_MAX_S
        group.now = alarm[0]
        alarm[1]()
        assert ("s" in group.sessions._sessions) == (group.now < 10 + 10)  # its turn ended unseen, and was seen at the first alarm
    assert group.now < 1000 + sessions.ALARM_MAX_S
    assert not alarms
    assert group.sessions._tokens == 0


def test_a_closed_session_is_gone_and_its_running_turn_runs_on() -> None:
    group = Group()
    group.open()
    group.turn("a", [1], [2])
    (journal,) = group.begin("b", rid="a")
    group.sessions.close("s")
    assert group.tokenize(journal, [3]) == [1, 2, 3]
    group.end(journal, [4])
    group.sessions.settle("b")
    assert (group.sessions.num_open, group.sessions.num_tokens, group.aborted) == (0, 0, [])
    with pytest.raises(SessionNotFound):
        group.sessions.close("s")
    group.open()
    with pytest.raises(SessionNotFound):
        group.begin("c", rid="a")


def test_sessions_and_their_tokens_are_bounded() -> None:
    group = Group(max_sessions=2, max_tokens=4)
    group.open("s")
    group.open("t")
    with pytest.raises(InvalidRequest, match="is open"):
        group.open("s")
    with pytest.raises(TooManySessions) as caught:
        group.open("u")
    assert (caught.value.status, caught.value.code) == (429, "too_many_sessions")
    group.turn("a", [1, 2], [3, 4])
    group.sessions.settle("a")
    with pytest.raises(TooManySessions) as caught:
        group.begin("b", session="t")
    assert (caught.value.status, caught.value.code) == (429, "too_many_session_tokens")
    group.sessions.close("s")
    assert group.turn("b", [1], [], session="t") == [1]
    group.open("u")


def test_a_session_holds_no_more_than_it_was_opened_for() -> None:
    group = Group()
    group.open(capacity=10)
    group.turn("a", [1, 2], [3], max_new_tokens=4)  # reserves 6, keeps 3
    (journal,) = group.begin("b", rid="a")
    group.tokenize(journal, [4], max_new_tokens=None)
    assert journal.tokenized is not None
    assert journal.tokenized.sampling_params.max_new_tokens == 6  # a length that nobody asked for ends where the capacity does
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": None}):
        (other,) = group.begin("c", rid=None)
        with pytest.raises(SessionFull) as caught:
            group.tokenize(other, [5], **options)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "session_full", "session_params.id")
        group.fail(other)
    group.end(journal, [6])
    (other,) = group.begin("c", rid="b")
    with pytest.raises(SessionFull):
        group.tokenize(other, [5], max_new_tokens=5)
    assert group.tokenize(other, [5], max_new_tokens=4) == [1, 2, 3, 4, 6, 5]


def test_turns_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_TURNS", 3)
    monkeypatch.setattr(session, "MAX_FAILED", 2)
    group = Group()
    group.open()
    for rid in "abc":
        group.fail(*group.begin(rid))
    group.turn("d", [1], [])
    assert list(group.sessions._sessions["s"].failed) == ["b", "c"]
    group.begin("e 0", "e 1", rid="d")
    with pytest.raises(SessionFull):
        group.begin("f")
    assert group.turn("f", [1], [], replace=True) == [1]


def test_turns_of_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_TURNS_OF_ALL", 2)
    group = Group()
    group.open("s")
    group.open("t")
    group.turn("a", [1], [])
    group.turn("b", [1], [], rid="a")
    group.sessions.settle("b")
    with pytest.raises(TooManySessions):
        group.begin("c", session="t")
    group.sessions.close("s")
    assert group.turn("c", [1], [], session="t") == [1]


def test_who_has_filled_the_bound_of_all_gets_below_it_by_replacing() -> None:
    group = Group(max_tokens=8)
    group.open()
    group.turn("a", [1, 2, 3], [4])
    group.turn("b", [5], [6, 7, 8], rid="a")
    for params in ({"rid": "b"}, {"rid": "b", "replace": True}, {"rid": "a"}):
        with pytest.raises(TooManySessions):
            group.begin("c", **params)
    assert group.turn("c", [9], [], rid="a", replace=True) == [1, 2, 3, 4, 9]
    assert group.sessions.num_tokens == 5


@pytest.mark.parametrize(("drop", "offsets"), [(False, (10, -10)), (True, (9, -9))])
def test_an_offset_outside_of_the_context_forgets_nothing(group: Group, drop: bool, offsets: tuple[int, int]) -> None:
    group.turn("c", [8], [], rid="b")
    (running,) = group.begin("d", rid="b")
    group.tokenize(running, [9])
    running.output_ids += [10]
    for offset in offsets:
        for rid in "abcd":
            with pytest.raises(InvalidRequest, match="offset"):
                group.begin("e", rid=rid, replace=True, drop_previous_output=drop, offset=offset)
    assert group.aborted == []
    group.end(running, [])
    assert group.turn("e", [1], [], rid="c") == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert group.turn("f", [1], [], rid="d") == [1, 2, 3, 4, 5, 6, 7, 9, 10, 1]


def test_the_whole_context_counts_against_the_model_s() -> None:
    group = Group()
    group.open()
    group.turn("a", [1] * 40, [2] * 8)
    (journal,) = group.begin("b", rid="a")
    with pytest.raises(ContextLengthExceeded, match=f"the prompt has {CONTEXT_LEN} tokens"):
        group.tokenize(journal, [3] * 16)


def test_entries_of_closed_sessions_do_not_pile_up() -> None:
    group = Group(timeout=1e9)
    for _ in range(1000):
        group.open()
        group.sessions.close("s")
    assert len(group.sessions._deadlines) < 50


def test_a_refused_turn_changes_nothing(group: Group) -> None:
    (running,) = group.begin("c", rid="b")
    refused = [{"rid": "b"}, {"rid": "c"}, {"rid": "x"}, {"rid": "x", "replace": True}, {"rid": "c", "replace": True}]
    for params in refused:
        with pytest.raises(RequestError):
            group.begin("d", **params)
    assert group.aborted == []
    assert group.tokenize(running, [8])[-2:] == [7, 8]
    journal = FakeJournal("d")
    assert journal.turn is None
