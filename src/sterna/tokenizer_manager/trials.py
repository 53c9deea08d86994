"""Which request makes the engine crash? After a second crash with the same ones in flight they run in halves, until the culprit is alone.

A crash is a strike against everyone in flight, and the first one against who has made `PROGRESS_TOKENS` since he was last sent. Who has
two is a suspect:

    crash, everyone back   crash again, so:   A B C D   crash   A B   passes, goes on; then   C D   crash   C   crash: C alone, 500
                                              on trial          on trial                      with A B      alone

The rest wait meanwhile. A trial is passed when each of its requests has ended or made progress.
"""

from __future__ import annotations

from collections import deque

from sterna.tokenizer_manager.req_state import ReqState

PROGRESS_TOKENS = 32
"""Output of one request that says that it got past what was there at the crash. As many batches of output may be lost with a process
(`scheduler.py: MAX_BATCHES_IN_FLIGHT`)."""
STRIKES = 3
"""Of a request that was alone in flight at the last one: it is the culprit."""


class Trials:
    """The search. While `searching`, nothing is sent but what `next_group` gives."""

    def __init__(self) -> None:
        self._on_trial: list[ReqState] = []
        self._waiting: deque[list[ReqState]] = deque()
        self.searching = False

    def crashed(self, in_flight: list[ReqState]) -> ReqState | None:
        """The engine has died with `in_flight`. Returns the culprit where that is certain now: it isn't to be sent again."""
        self._on_trial = []
        for state in in_flight:
            state.strikes = 1 if _has_progressed(state) else state.strikes + 1
        if len(in_flight) == 1 and in_flight[0].strikes >= STRIKES:
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
    return len(state.output_ids) - state.tokens_at_dispatch >= PROGRESS_TOKENS
