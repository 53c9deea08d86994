"""How often a child that dies for no request's sake is started again."""

from __future__ import annotations

MAX_IN_A_ROW = 5
STABLE_S = 60.0
"""A child that lived so long had come up."""
FIRST_DELAY_S = 0.1


class RestartBudget:
    """Counts deaths in a row that nothing was accomplished between: a start that fails, an engine that dies with nothing to do.

    Deaths with requests in flight are bounded otherwise: each request makes progress or is convicted (`tokenizer_manager/trials.py`).
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def next_delay(self, *, served: bool, lived_s: float) -> float | None:
        """A child has died; seconds to wait before the next start, or None: give up.

        `served`: the engine was at work, or had been since it came up.
        """
        if served or lived_s > STABLE_S:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            return None
        return 0.0 if self._in_a_row == 1 else FIRST_DELAY_S * 2 ** (self._in_a_row - 2)
