"""The running batch: requests that get one token a step, as arrays that persist from step to step; and retraction.

The arrays are indexed by `req_pool_idx`: nothing moves when somebody leaves, and a step in flight finds its rows where they were. They say
what has been *submitted*; what has been read stands in the `Req`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sterna.mem_cache.allocator import Int32Array, Int64Array, OutOfSlots
from sterna.mem_cache.window import least_window_tokens
from sterna.scheduler.finish import needs_every_token
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req, ReqState

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Decodes:
    """Who takes one token of a step. Every array is the step's own."""

    reqs: list[Req]
    rows: Int64Array
    """(reqs,): `req_pool_idx`; int64, which NumPy indexes with several times as fast."""
    positions: Int32Array
    """(reqs,): of the token that goes in."""
    look: NDArray[np.bool_]
    """(reqs,): whose token is looked at, whatever it is: each may complete a stop, or has logprobs, or it is the last."""

    def __len__(self) -> int:
        return len(self.reqs)

    def only(self, which: list[int]) -> Decodes:
        return Decodes([self.reqs[i] for i in which], self.rows[which], self.positions[which], self.look[which])


class RunningBatch:
    def __init__(self, max_rows: int) -> None:
        self.reqs: list[Req] = []
        self._rows = np.zeros(max_rows, dtype=np.int64)
        """`req_pool_idx` of `reqs[i]`."""
        self.next_position = np.zeros(max_rows, dtype=np.int32)
        """Of the next token to be submitted."""
        self.end_position = np.zeros(max_rows, dtype=np.int32)
        """Where that ends: the position of the last output token, which is never submitted."""
        self.allocated_lens = np.zeros(max_rows, dtype=np.int32)
        self.last_token = np.zeros(max_rows, dtype=np.int32)
        """Read last: the next input, unless that is in flight."""
        self.watched = np.zeros(max_rows, dtype=np.bool_)
        """Rows whose every token is looked at, not only end tokens and the last (`needs_every_token`)."""

    def __len__(self) -> int:
        return len(self.reqs)

    # ---- who is in it ----

    def prepare(self, req: Req) -> None:
        """The step that samples `req`'s next token is submitted: it may take the one after it too, and joins when that token is read."""
        row = req.req_pool_idx
        self.next_position[row] = len(req.fill_ids)
        self.end_position[row] = req.num_prompt + req.max_new_tokens - 1
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

    def next_decodes(self, fresh: list[Req]) -> Decodes:
        """Who takes the next step: those that run, and `fresh` ones whose first token is in flight; but nobody whose last token is."""
        rows = self._rows[: len(self.reqs)].copy()
        if fresh:
            rows = np.concatenate([rows, np.array([req.req_pool_idx for req in fresh], dtype=np.int64)])
        positions = self.next_position[rows]
        left = self.end_position[rows] - positions
        decodes = Decodes(self.reqs + fresh, rows, positions, self.watched[rows] | (left == 1))
        if np.count_nonzero(left) == len(left):
            return decodes
        return decodes.only(np.flatnonzero(left).tolist())

    def advance(self, decodes: Decodes) -> None:
        """A token of each is submitted."""
        self.next_position[decodes.rows] = decodes.positions + 1

    def restore(self, req: Req) -> None:
        """Of `req`, which runs, nothing is in flight: what was submitted and not read came to nothing."""
        self.next_position[req.req_pool_idx] = req.num_tokens - 1

    def future_tokens(self, clip: int) -> int:
        """Output tokens that may still come, at most `clip` a row."""
        rows = self._rows[: len(self.reqs)]
        return int(np.minimum(self.end_position[rows] - self.next_position[rows], clip).sum())

    def future_slots(self, share: float, window: int, page_size: int) -> int:
        """Slots that a group with `window` still gives out for them, if `share` of them come: those of a row that has a window's worth come
        from what it gives back."""
        rows = self._rows[: len(self.reqs)]
        positions = self.next_position[rows]
        growth = np.maximum(least_window_tokens(window, page_size) - positions, page_size)
        return int(np.minimum((self.end_position[rows] - positions) * share, growth).sum())

    # ---- its memory ----

    def grow(self, decodes: Decodes, ledger: KVLedger) -> bool:
        """A slot for every one's next token; False, and nothing has changed, where memory is too short for that."""
        short = self._need_page(decodes)
        if len(short):
            try:
                ledger.grow_by_page([decodes.reqs[i] for i in short.tolist()])
            except OutOfSlots:
                return False
            self.allocated_lens[decodes.rows[short]] += ledger.page_size
        return True

    def grow_one_by_one(self, decodes: Decodes, ledger: KVLedger) -> tuple[bool, list[Req]]:
        """After a fault in `grow`: as far as memory goes, a slot for everyone but those, returned, whose growing fails alone too.

        Also whether it went far enough.
        """
        failed: list[Req] = []
        for i in self._need_page(decodes).tolist():
            self.allocated_lens[decodes.rows[i]] = decodes.reqs[i].allocated_len  # the fault may have come after the pages
        for i in self._need_page(decodes).tolist():
            req = decodes.reqs[i]
            try:
                ledger.grow_by_page([req])
                self.allocated_lens[decodes.rows[i]] += ledger.page_size
            except OutOfSlots:
                return False, failed
            except Exception:
                log.exception("%s: no slot could be given to it", req.rid)
                failed.append(req)
        return True, failed

    def _need_page(self, decodes: Decodes) -> Int64Array:
        """Of `decodes`, which have no slot for their token yet."""
        return np.flatnonzero(decodes.positions == self.allocated_lens[decodes.rows])


def choose_victim(candidates: list[Req]) -> Req:
    """Whom to retract when memory runs out: of the lowest priority there is the one with fewest outputs, among equals who came last."""
    return min(candidates, key=lambda req: (req.priority, len(req.output_ids), -req.serial))
