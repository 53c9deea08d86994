"""One token through the model before the process says that it is ready: what can't run at all is found by nobody's request."""

from __future__ import annotations

import logging

import numpy as np

from sterna.errors import StartupError
from sterna.executor.base import ROLE_PROMPT, STATUS_OK, WANT_SAMPLE, Executor, ForwardBatch, GroupSlots
from sterna.mem_cache.req_to_token import ReqToToken
from sterna.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

STEP = -1
"""Before the first that counts."""
ROW = 0


def first_forward(executor: Executor, tables: ReqToToken, token: int) -> None:
    """Run a prompt of `token` in row 0 and slot 0 of every group, which nobody has yet, and let both go again. Raises StartupError.

    A model that gives no valid token for it is told in the log only: it may for others.
    """
    one = np.ones(1, dtype=np.int32)
    batch = ForwardBatch(
        step=STEP,
        input_ids=one * token,
        input_from=None,
        row_splits=np.arange(2, dtype=np.int32),
        prefix_lens=one * 0,
        seq_lens=one,
        req_pool_idx=one * ROW,
        roles=np.full(1, ROLE_PROMPT, dtype=np.uint8),
        wants=np.full(1, WANT_SAMPLE, dtype=np.uint8),
        groups=tuple(GroupSlots(table[ROW, :1].copy(), table) for table in tables.tables),
    )
    try:
        executor.bind(ROW, SamplingParams(max_new_tokens=1, temperature=0.0), batch.input_ids, np.zeros(0, dtype=np.int32))
        output = executor.submit(batch).result()
        executor.release(ROW)
    except Exception as fault:
        raise StartupError(f"the model's first forward failed: {fault}") from fault
    if output.status[0] != STATUS_OK:
        log.warning("the model's first forward gave no valid token")
