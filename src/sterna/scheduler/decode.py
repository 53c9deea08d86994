"""The running batch: requests that get one token a step, as arrays that persist from step to step; and retraction.

The arrays are indexed by `req_pool_idx`, so that nothing moves when somebody leaves, and a step in flight finds its rows where they were. They
say what has been *submitted*: what has been read stands in the `Req`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from sterna.mem_cache.allocator import Int32Array, Int64Array, OutOfSlots
from sterna.scheduler.finish import needs_every_token
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req, ReqState

log = logging.getLogger(__name__)


class RunningBatch:
    def __init__(self, max_rows: int) -> None:
        self.reqs: list[Req] = []
        self._rows = np.zeros(max_rows, dtype=np.int32)
        """`req_pool_idx` of `reqs[i]`."""
        self.next_position = np.zeros(max_rows, dtype=np.int32)
        """Of the next token to be submitted."""
        self.tokens_left = np.zeros(max_rows, dtype=np.int32)
        """Output tokens that no step has been submitted for. At 0 the row isn't submitted again: its ending is known in advance."""
        self.allocated_lens = np.zeros(max_rows, dtype=np.int32)
        self.last_token = np.zeros(max_rows, dtype=np.int32)
        """Read last: the next input, unless that is in flight."""
        self.watched = np.zeros(max_rows, dtype=np.bool_)
        """Rows whose every token is checked for stops, not only end tokens and the last."""

    def __len__(self) -> int:
        return len(self.reqs)

    # ---- who is in it ----

    def prepare(self, req: Req) -> None:
        """The step that samples `req`'s first token is submitted. From now on it may be among `next_rows`; it joins when that is read."""
        row = req.req_pool_idx
        self.next_position[row] = len(req.fill_ids)
        self.tokens_left[row] = req.tokens_left - 1
        self.allocated_lens[row] = req.allocated_len
        self.watched[row] = needs_every_token(req)

    def add(self, req: Req) -> None:
        """`req`'s prefill is done and its next token read."""
        self._rows[len(self.reqs)] = req.req_pool_idx
        self.last_token[req.req_pool_idx] = req.output_ids[-1]
        # Last, so that a fault above leaves the batch as it was.
        self.reqs.append(req)
        req.state = ReqState.RUNNING

    def remove(self, gone: Collection[Req]) -> None:
        """The requests get their `kv_len`: all that has been read but the last token."""
        for req in self.reqs:
            if req in gone:
                req.kv_len = req.num_tokens - 1
        self.reqs = [req for req in self.reqs if req not in gone]
        self._rows[: len(self.reqs)] = [req.req_pool_idx for req in self.reqs]

    # ---- a step ----

    def next_rows(self, fresh: list[Req]) -> tuple[list[Req], Int32Array]:
        """Who takes the next step, and their `req_pool_idx`: those that run, and `fresh` ones whose first token is in flight; but nobody
        whose last token is."""
        reqs = self.reqs + fresh
        rows = self._rows[: len(self.reqs)].copy()
        if fresh:
            rows = np.concatenate([rows, np.array([req.req_pool_idx for req in fresh], dtype=np.int32)])
        more = self.tokens_left[rows] > 0
        if more.all():
            return reqs, rows
        going = np.flatnonzero(more)
        return [reqs[i] for i in going.tolist()], rows[going]

    def advance(self, rows: Int32Array) -> None:
        """A token of each is submitted."""
        self.next_position[rows] += 1
        self.tokens_left[rows] -= 1

    def restore(self, req: Req) -> None:
        """Of `req`, which runs, nothing is in flight: what was submitted and not read came to nothing."""
        self.next_position[req.req_pool_idx] = req.num_tokens - 1
        self.tokens_left[req.req_pool_idx] = req.tokens_left

    def future_tokens(self, clip: int) -> int:
        """Output tokens that may still come, at most `clip` a row."""
        return int(np.minimum(self.tokens_left[self._rows[: len(self.reqs)]], clip).sum())

    # ---- its memory ----

    def grow(self, reqs: list[Req], rows: Int32Array, ledger: KVLedger) -> bool:
        """A slot for every one's next token; False, and nothing has changed, where memory is too short for that."""
        short = self._need_page(rows)
        if len(short):
            try:
                ledger.grow_by_page([reqs[i] for i in short.tolist()])
            except OutOfSlots:
                return False
            self.allocated_lens[rows[short]] += ledger.page_size
        return True

    def grow_one_by_one(self, reqs: list[Req], rows: Int32Array, ledger: KVLedger) -> tuple[bool, list[Req]]:
        """After a fault in `grow`: as far as memory goes, a slot for everyone but those, returned, whose growing fails alone too.

        Also whether everyone else has his slot.
        """
        failed: list[Req] = []
        for i in self._need_page(rows).tolist():
            self.allocated_lens[rows[i]] = reqs[i].allocated_len  # the fault may have come after the pages
        for i in self._need_page(rows).tolist():
            try:
                ledger.grow_by_page([reqs[i]])
                self.allocated_lens[rows[i]] += ledger.page_size
            except OutOfSlots:
                return False, failed
            except Exception:
                log.exception("%s: no slot could be given to it", reqs[i].rid)
                failed.append(reqs[i])
        return True, failed

    def _need_page(self, rows: Int32Array) -> Int64Array:
        """Of `rows`, which have no slot for their next token yet."""
        return np.flatnonzero(self.next_position[rows] == self.allocated_lens[rows])


def choose_victim(candidates: list[Req]) -> Req:
    """Whom to retract when memory runs out: fewest outputs first, among equals who came last."""
    return min(candidates, key=lambda req: (len(req.output_ids), -req.serial))
