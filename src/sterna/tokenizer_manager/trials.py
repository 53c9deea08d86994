"""Which request makes the engine crash? After a second crash with the same ones in flight they run in halves, until the culprit is alone.

A crash is a strike against everyone in flight. Who has made `PROGRESS_TOKENS` since his first one, or was struck by another process last,
begins anew with one. Who has two is a suspect:

    crash, everyone back   crash again, so:   A B C D   crash   A B   passes, goes on; then   C D   crash   C   crash: C alone, 500
                                              on trial          on trial                      with A B      alone

The rest wait meanwhile. A trial is passed when each of its requests has ended or made progress.
"""

from __future__ import annotations

from collections import deque

from sterna.protocol.control import ProcessName
from sterna.tokenizer_manager.req_state import ReqState

PROGRESS_TOKENS = 8
"""Output of one request that says that it got past what was there at the crash. More than that may have been lost with the process, and be
made again by the culprit: he is found a crash later then, and nobody else is taken for him."""
STRIKES = 3
"""Of a request that was alone in flight at the last one: it is the culprit."""


class Trials:
    """The search. While `searching`, nothing is sent but what `next_group` gives."""

    def __init__(self) -> None:
        self._on_trial: list[ReqState] = []
        self._waiting: deque[list[ReqState]] = deque()
        self.searching = False

    def crashed(self, process: ProcessName, in_flight: list[ReqState], ending: int = 0) -> ReqState | None:
        """`process` has died with `in_flight` and with `ending` more, which come to their end by it: it may have been one of those.

        Returns the culprit where that is certain now: it isn't to be sent again.
        """
        self._on_trial = []
        for state in in_flight:
            if state.struck_by != process or _has_progressed(state):
                state.strikes, state.struck_by, state.tokens_at_strike = 0, process, len(state.output_ids)
            state.strikes += 1
        if len(in_flight) == 1 and not ending and in_flight[0].strikes >= STRIKES:
            # The others are innocent, most likely: together, then.
            others = [state for group in self._waiting for state in group]
            self._waiting = deque([others])
            return in_flight[0]
        suspects = [state for state in in_flight if state.strikes > 1]
        rest = [state for state in in_flight if state.strikes <= 1]
        if suspects:
            self.searching = True
        if self.searching:
            half = (len(suspects) + 1) // 2
            self._waiting.extendleft([rest, suspects[half:], suspects[:half]])
        return None

    def next_group(self) -> list[ReqState]:
        """Whom to send now, beside those that passed: the next that are on trial, or nobody. The search is over where nobody waits."""
        if not all(state.finished or _has_progressed(state) for state in self._on_trial):
            return []
        self._on_trial = []
        while self._waiting and not self._on_trial:
            self._on_trial = [state for state in self._waiting.popleft() if not state.finished]
        self.searching = bool(self._on_trial)
        return self._on_trial


def _has_progressed(state: ReqState) -> bool:
    return len(state.output_ids) - state.tokens_at_strike >= PROGRESS_TOKENS
