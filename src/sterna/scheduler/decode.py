"""The running batch: requests that get one token a step, as arrays that persist from step to step; and retraction.

Row i of every array belongs to `reqs[i]`. Per step nothing is rebuilt; rows move only when one leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from sterna.mem_cache.allocator import OutOfSlots
from sterna.mem_cache.window import least_window_tokens
from sterna.scheduler.finish import needs_every_token
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req, ReqState

log = logging.getLogger(__name__)


class RunningBatch:
    def __init__(self, max_rows: int) -> None:
        self.reqs: list[Req] = []
        self.req_pool_idx = np.zeros(max_rows, dtype=np.int32)
        self.kv_lens = np.zeros(max_rows, dtype=np.int32)
        """Tokens whose KV is computed: all but `last_token`."""
        self.allocated_lens = np.zeros(max_rows, dtype=np.int32)
        self.last_token = np.zeros(max_rows, dtype=np.int32)
        self.tokens_left = np.zeros(max_rows, dtype=np.int32)
        self.watched = np.zeros(max_rows, dtype=np.bool_)
        """Rows whose every token is checked for stops, not only end tokens and the last."""
        self._arrays = (self.req_pool_idx, self.kv_lens, self.allocated_lens, self.last_token, self.tokens_left, self.watched)

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, req: Req) -> None:
        """`req`'s prefill is done and its next token sampled."""
        i = len(self.reqs)
        self.req_pool_idx[i] = req.req_pool_idx
        self.kv_lens[i] = req.kv_len
        self.allocated_lens[i] = req.allocated_len
        self.last_token[i] = req.output_ids[-1]
        self.tokens_left[i] = req.tokens_left
        self.watched[i] = needs_every_token(req)
        # Last, so that a fault above leaves the batch as it was.
        self.reqs.append(req)
        req.state = ReqState.RUNNING

    def remove(self, gone: Collection[Req]) -> None:
        """Close the gaps. The requests get their `kv_len` back."""
        keep = [i for i, req in enumerate(self.reqs) if req not in gone]
        for i, req in enumerate(self.reqs):
            if req in gone:
                req.kv_len = int(self.kv_lens[i])
        for array in self._arrays:
            array[: len(keep)] = array[keep]
        self.reqs = [self.reqs[i] for i in keep]

    def need_page(self) -> list[int]:
        """Rows whose next token has no slot yet."""
        n = len(self.reqs)
        return np.flatnonzero(self.kv_lens[:n] == self.allocated_lens[:n]).tolist()

    def future_tokens(self, clip: int) -> int:
        """Output tokens that may still come, at most `clip` a row."""
        return int(np.minimum(self.tokens_left[: len(self.reqs)], clip).sum())

    def future_slots(self, share: float, window: int, page_size: int) -> int:
        """Slots that a group with `window` still gives out for them, if `share` of them come: those of a row that has a window's worth come
        from what it gives back."""
        n = len(self.reqs)
        growth = np.maximum(least_window_tokens(window, page_size) - self.kv_lens[:n], page_size)
        return int(np.minimum(self.tokens_left[:n] * share, growth).sum())

    def grow(self, ledger: KVLedger) -> bool:
        """A slot for every row's next token; False, and nothing has changed, where memory is too short for that."""
        rows = self.need_page()
        if rows:
            try:
                ledger.grow_by_page([self.reqs[i] for i in rows])
            except OutOfSlots:
                return False
            self.allocated_lens[rows] += ledger.page_size
        return True

    def grow_one_by_one(self, ledger: KVLedger) -> list[Req]:
        """After a fault in `grow`: as far as memory goes, a slot for everyone but those, returned, whose growing fails alone too."""
        failed: list[Req] = []
        for row in self.need_page():
            self.allocated_lens[row] = self.reqs[row].allocated_len  # the fault may have come after the pages
        for row in self.need_page():
            req = self.reqs[row]
            try:
                ledger.grow_by_page([req])
                self.allocated_lens[row] += ledger.page_size
            except OutOfSlots:
                break
            except Exception:
                log.exception("%s: no slot could be given to it", req.rid)
                failed.append(req)
        return failed


def choose_victim(candidates: list[Req]) -> Req:
    """Whom to retract when memory runs out: fewest outputs first, among equals who came last."""
    return min(candidates, key=lambda req: (len(req.output_ids), -req.serial))
