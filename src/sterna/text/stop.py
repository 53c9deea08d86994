"""Stop strings in a growing text.

The text that is pushed is the stable text of a `DecodeStatus` and, last, what its `finish()` returns. The scheduler pushes it token
by token and ends the request at a match; the detokenizer pushes the same text to know how much of it must wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    start: int
    """Characters of the whole text before the match."""
    end: int
    """`start` plus the stop's length."""


class StopMatcher:
    """Finds stops across any number of pushes: Knuth, Morris and Pratt's automaton for each, so that work per character is constant
    however long the stops are (and a search at the speed of `str.find` while none has begun)."""

    __slots__ = ("_automata", "held", "length")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` aren't empty. Takes time and memory in proportion to their length."""
        self._automata = [_Automaton(stop) for stop in stops]
        self.length: int = 0
        """Characters pushed."""
        self.held: int = 0
        """How many characters at the end of the text could still be the beginning of a stop: they mustn't be sent yet."""

    def push(self, text: str) -> StopMatch | None:
        """Take more text. Of the matches that end in it, the one that begins first; of several there, the shortest.

        A match that the caller may not act on (`min_new_tokens`) is simply passed over: the matcher goes on, and a later push reports
        what ends in that push, overlaps included.
        """
        found: StopMatch | None = None
        held = 0
        for automaton in self._automata:
            end = automaton.push(text)
            held = max(held, automaton.matched)
            if end is not None:
                stop = automaton.stop
                match = StopMatch(stop, self.length + end - len(stop), self.length + end)
                if found is None or (match.start, match.end) < (found.start, found.end):
                    found = match
        self.length += len(text)
        self.held = held
        return found


class _Automaton:
    """One stop. `matched` is the length of its longest proper prefix that the text ends with."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def push(self, text: str) -> int | None:
        """Where in `text` the first match ends."""
        stop, borders, matched = self.stop, self._borders, self.matched
        first = None
        at = 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            at += 1
            if matched == len(stop):
                matched = borders[-1]
                if first is None:
                    first = at
        self.matched = matched
        return first


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
