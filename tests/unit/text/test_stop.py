"""Stops in a growing text, against `str.find` on the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from sterna.text.stop import StopMatch, StopMatcher

words = st.text("ab\n世", min_size=1, max_size=5)
stop_lists = st.lists(words, min_size=1, max_size=4)
pushes = st.lists(st.text("ab\n世", max_size=7), max_size=8)


def completed(stop: str, before: str, text: str) -> list[StopMatch]:
    """Every match of `stop` in before + text that ends in text."""
    whole = before + text
    starts = [i for i in range(len(whole)) if whole.startswith(stop, i)]
    return [StopMatch(stop, i, i + len(stop)) for i in starts if i + len(stop) > len(before)]


@given(stop_lists, pushes)
def test_each_push_reports_the_leftmost_of_the_matches_that_end_in_it(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stops)
    before = ""
    for text in texts:
        every = [match for stop in stops for match in completed(stop, before, text)]
        assert matcher.push(text) == min(every, key=lambda match: (match.start, match.end), default=None)
        before += text
    assert matcher.length == len(before)


@given(stop_lists, pushes)
def test_what_is_held_is_the_longest_end_that_could_begin_a_stop(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stops)
    before = ""
    for text in texts:
        matcher.push(text)
        before += text
        starts = (n for n in range(len(before), 0, -1) if any(len(s) > n and s.startswith(before[-n:]) for s in stops))
        assert matcher.held == next(starts, 0)


@given(stop_lists, pushes)
def test_no_character_of_a_stop_leaves_before_it_matches(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    whole = ""
    for text in texts:
        whole += text
        match = matcher.push(text)
        if match is not None:
            assert len(sent) <= match.start
            first = min(whole.find(stop) for stop in stops if stop in whole)
            assert match.start == first
            return
        sent = whole[: len(whole) - matcher.held]
    assert not any(stop in whole for stop in stops)


def test_a_stop_spread_over_four_pushes_is_found_where_it_begins() -> None:
    matcher = StopMatcher(["</answer>"])
    assert [matcher.push(text) for text in ("yes</", "ans", "we")] == [None] * 3
    assert matcher.held == 7
    assert matcher.push("r>!") == StopMatch("</answer>", 3, 12)
    assert matcher.held == 0


def test_a_stop_inside_a_token_leaves_what_is_before_it() -> None:
    assert StopMatcher(["\n"]).push("?\n") == StopMatch("\n", 1, 2)


def test_a_match_that_comes_too_early_is_passed_over_and_overlaps_are_still_found() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.push("aba") == StopMatch("aba", 0, 3)
    assert matcher.push("b") is None
    assert matcher.push("a") == StopMatch("aba", 2, 5)


def test_of_two_that_begin_together_the_shorter_is_reported_as_it_would_be_character_by_character() -> None:
    assert StopMatcher(["abc", "ab"]).push("abc") == StopMatch("ab", 0, 2)


def test_long_stops_cost_constant_work_per_character() -> None:
    class Counting(str):
        compared = 0

        def __getitem__(self, key: object) -> str:
            Counting.compared += 1
            return super().__getitem__(key)  # type: ignore[index]

    stop = "a" * 3000 + "b"
    matcher = StopMatcher([Counting(stop)])
    Counting.compared = 0
    text = ("a" * 2999 + "c") * 3
    for char in text:
        assert matcher.push(char) is None
    assert Counting.compared < 6 * len(text)
