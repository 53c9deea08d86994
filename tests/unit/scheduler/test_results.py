"""A step's ragged output, row by row."""

import numpy as np
import pytest

from sterna.executor.base import STATUS_NAN, STATUS_OK, StepOutput
from sterna.protocol.logprobs import TokenLogprobs
from sterna.scheduler.results import tokens_by_row

FIRST, SECOND = TokenLogprobs(-1.0), TokenLogprobs(-2.0)


def output(logprobs: list[TokenLogprobs | None] | None) -> StepOutput:
    """Of three rows, the second of which got none."""
    status = np.array([STATUS_OK, STATUS_NAN, STATUS_OK], dtype=np.uint8)
    return StepOutput(0, np.array([5, 7], dtype=np.int32), np.array([0, 1, 1, 2], dtype=np.int32), status, logprobs)


def test_logprobs_stay_with_their_tokens_past_a_row_that_has_none() -> None:
    made = tokens_by_row(output([FIRST, SECOND]), 3)
    assert made.tokens.tolist() == [5, -1, 7]
    assert [made.logprobs_of(row) for row in range(3)] == [FIRST, None, SECOND]
    made = tokens_by_row(output(None), 3)
    assert [made.logprobs_of(row) for row in range(3)] == [None] * 3


@pytest.mark.parametrize("logprobs", [[FIRST], [FIRST, None, SECOND]])
def test_logprobs_that_are_not_one_per_token_are_a_fault_of_the_step(logprobs: list[TokenLogprobs | None]) -> None:
    with pytest.raises(ValueError, match="2 tokens and logprobs of"):
        tokens_by_row(output(logprobs), 3)
