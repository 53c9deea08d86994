"""From the waiting queue to the first token: admission by memory estimate, chunks under a token budget, and waiting for a prefix
that another request is computing right now.

A follower is a waiting request whose prefix a leader, in prefill, has begun to compute: computing it twice would be waste. It goes
back to the queue's front when the leader leaves prefill, or after as many steps as computing the shared part alone would take.
"""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from sterna.mem_cache.allocator import Int64Array
from sterna.protocol.finish import FAULT, FinishAbort
from sterna.protocol.generate import CacheNamespace
from sterna.scheduler.batch import PrefillChunk
from sterna.scheduler.decode import RunningBatch
from sterna.scheduler.finish import DOES_NOT_FIT
from sterna.scheduler.kv import Demand, KVLedger
from sterna.scheduler.policy import SchedulePolicy
from sterna.scheduler.req import Req, ReqState
from sterna.scheduler.waiting import WaitingQueue

log = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 16_384
"""Of a step without a chunk size; one prompt may be longer."""
SCAN_LIMIT = 128
"""Waiting requests looked at in one step."""
OUTPUT_ESTIMATE_CLIP = 4_096
"""No request is expected to make more tokens than this."""
LEADERS_COMPARED = 8


class NewTokenRatio:
    """The share of its permitted output that a request is expected to make: falls from 0.7 to 0.098 over 600 steps without a retraction."""

    INITIAL, FLOOR, STEPS = 0.7, 0.098, 600

    def __init__(self) -> None:
        self.value = self.INITIAL

    def step(self) -> None:
        self.value = max(self.FLOOR, self.value - (self.INITIAL - self.FLOOR) / self.STEPS)

    def retracted(self, reqs: list[Req]) -> None:
        """Expect of all what those that run have made already, and 20 tokens more each."""
        made = sum(len(req.output_ids) + 20 for req in reqs)
        permitted = sum(req.max_new_tokens for req in reqs)
        self.value = min(1.0, max(self.value, made / max(permitted, 1)))

    def reset(self) -> None:
        self.value = self.INITIAL


@dataclass(slots=True, eq=False)
class Admissions:
    admitted: list[Req] = field(default_factory=list)
    rejected: list[tuple[Req, FinishAbort]] = field(default_factory=list)
    """To be ended for this reason."""


class Prefill:
    def __init__(self, ledger: KVLedger, policy: SchedulePolicy, *, chunk_size: int, max_rows: int) -> None:
        self.waiting = WaitingQueue(policy.order)
        self.active: list[Req] = []
        """In prefill, in order of admission."""
        self.ratio = NewTokenRatio()
        self._ledger = ledger
        self._policy = policy
        self._chunk_size = chunk_size
        self.max_rows = max_rows
        self._followers = Followers(ledger)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._followers)

    # ---- admission ----

    def admit(self, running: RunningBatch, *, step: int, landed: int) -> Admissions:
        """Move requests from the queue to prefill while step `step`, the next one, has budget, rows and memory for them.

        The results of all steps below `landed` have been read: what those computed can be matched.
        """
        self.waiting.push_front(self._followers.due(landed))
        result = Admissions()
        rows = self.max_rows - len(running) - len(self.active)
        budget = (self._chunk_size or MAX_PREFILL_TOKENS) - sum(_missing(req) for req in self.active)
        if rows <= 0 or budget <= 0 or not self.waiting:
            return result
        self._policy.sort(self.waiting)
        committed = self._committed(running)
        for _ in range(SCAN_LIMIT):
            req = self.waiting.head()
            if req is None or len(result.admitted) == rows or budget <= 0:
                break
            try:
                demand = self._try(req, committed, alone=not self.active and not running.reqs, step=step)
            except Exception:
                # The fault may have come before or after it left the queue; its ending takes it out of wherever it is now.
                log.exception("%s: could not be admitted", req.rid)
                self.waiting.discard(req)
                result.rejected.append((req, FAULT))
                continue
            if req in self.waiting:
                if not self.active and not running.reqs and landed == step:
                    # Nobody else holds memory, none that has ended either, and still there is too little.
                    result.rejected.append((req, DOES_NOT_FIT))
                    self.waiting.discard(req)
                break
            if req.state is ReqState.PREFILL:
                result.admitted.append(req)
                committed = _sum(committed, demand)
                budget -= _missing(req)
        return result

    def _try(self, req: Req, committed: Demand, *, alone: bool, step: int) -> Demand:
        """Admit the queue's head, or let it follow a leader, or leave it where it is. Returns the memory that it is expected to take."""
        match = self._ledger.match(req)
        if self._followers.follow(req, match.length, self._chunk_size, step):
            self.waiting.discard(req)
            return self._ledger.demand(0, 0, 0)
        missing = req.num_tokens - match.length
        demand = self._demand(req, match.length, missing)
        # The only request needs no estimate: it runs until it ends or memory does, in chunks as small as memory is short.
        least = self._ledger.demand(self._ledger.whole_pages(missing), match.length, 0)
        if self._ledger.open(req, match, least if alone else _sum(committed, demand)):
            self._start(req, req.kv_len)
        return demand

    def _start(self, req: Req, cached: int) -> None:
        self.waiting.discard(req)
        if not req.retractions:
            req.cached_tokens = min(cached, req.num_prompt)
        self.active.append(req)
        req.submitted_len = req.kv_len
        req.state = ReqState.PREFILL
        self._followers.lead(req)

    def _committed(self, running: RunningBatch) -> Demand:
        """Per group, tokens of memory that those already admitted are expected to take yet."""
        outputs = [int(running.future_tokens(OUTPUT_ESTIMATE_CLIP) * self.ratio.value)] * len(self._ledger.owned)
        for group, window in self._ledger.pools.windows:
            outputs[group] = running.future_slots(self.ratio.value, window, self._ledger.page_size)
        for req in self.active:
            outputs = _sum(outputs, self._demand(req, req.submitted_len, _missing(req)))
        return outputs

    def _demand(self, req: Req, length: int, missing: int) -> Demand:
        """Of `req`, with `length` computed tokens, `missing` others that are there to be computed, and its expected outputs."""
        outputs = min(req.tokens_left, OUTPUT_ESTIMATE_CLIP) * self.ratio.value
        tokens = self._ledger.whole_pages(missing) + self._ledger.page_size + int(outputs)
        return self._ledger.demand(tokens, length, min(missing, self._chunk_size or missing))

    # ---- chunks ----

    def chunks(self) -> tuple[list[PrefillChunk], list[Req]]:
        """This step's share of every prefill, oldest first, with slots allocated. Less than the budget where memory is short.

        Also those that a fault keeps from having theirs: to be ended.
        """
        budget = self._chunk_size or sum(_missing(req) for req in self.active)
        chunks: list[PrefillChunk] = []
        failed: list[Req] = []
        for req in self.active:
            start = req.submitted_len
            if start == len(req.fill_ids):
                continue  # its last one is in flight
            # Prompt and generated tokens are computed in different roles, so never in one row.
            stop = req.num_prompt if start < req.num_prompt else len(req.fill_ids)
            room = req.allocated_len - start + self._ledger.obtainable
            end = min(stop, start + budget, start + room)
            if end <= start:
                break
            try:
                self._ledger.grow(req, end)
            except Exception:
                log.exception("%s: no slots could be given to it", req.rid)
                failed.append(req)
                continue
            chunks.append(PrefillChunk(req, start, end))
            budget -= end - start
            if budget <= 0:
                break
        return chunks, failed

    # ---- leaving ----

    def leave(self, req: Req) -> None:
        """`req` is no longer in prefill, if it was: whoever waits for it goes on."""
        if req in self.active:
            self.active.remove(req)
        self.waiting.push_front(self._followers.dismiss(req))

    def forget(self, req: Req) -> None:
        """`req` doesn't wait any longer, if it did."""
        self.waiting.discard(req)
        if req in self._followers:
            self._followers.forget(req)


class Followers:
    """Who waits for whose prefix. Cost per step: those that stop waiting."""

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._leaders: defaultdict[tuple[CacheNamespace, bytes], list[Req]] = defaultdict(list)
        """Requests in prefill, by the first page of their prompt."""
        self._followers: dict[Req, Req] = {}
        """Follower -> leader."""
        self._of: defaultdict[Req, dict[Req, None]] = defaultdict(dict)
        self._deadlines: list[tuple[int, int, Req]] = []

    def __len__(self) -> int:
        return len(self._followers)

    def __contains__(self, req: Req) -> bool:
        return req in self._followers

    def lead(self, req: Req) -> None:
        """`req` enters prefill."""
        if self._ledger.cache.shares and req.num_prompt > self._ledger.page_size:
            self._leaders[self._first_page(req)].append(req)

    def follow(self, req: Req, matched: int, chunk_size: int, step: int) -> bool:
        """Whether `req`, of which `matched` tokens are cached, had better wait; then it does, once."""
        if not self._ledger.cache.shares or req.has_waited_for_prefix or req.num_prompt <= self._ledger.page_size:
            return False
        leaders = self._leaders.get(self._first_page(req))
        if not leaders:
            return False
        common, leader = max(((self._common(req, each), each) for each in leaders[:LEADERS_COMPARED]), key=lambda pair: pair[0])
        shared = common - matched
        if shared < self._ledger.page_size:
            return False
        alone_steps = -(-shared // chunk_size) if chunk_size else 1
        req.has_waited_for_prefix = True
        self._followers[req] = leader
        self._of[leader][req] = None
        heapq.heappush(self._deadlines, (step + alone_steps, req.serial, req))
        return True

    def due(self, landed: int) -> list[Req]:
        """Those that have waited long enough, when the results of `landed` steps are in."""
        reqs: list[Req] = []
        while self._deadlines and self._deadlines[0][0] <= landed:
            req = heapq.heappop(self._deadlines)[2]
            if req in self._followers:
                self.forget(req)
                reqs.append(req)
        return reqs

    def dismiss(self, leader: Req) -> list[Req]:
        """`leader` leaves prefill. Returns its followers."""
        key = self._first_page(leader)
        if leader in self._leaders.get(key, ()):
            self._leaders[key].remove(leader)
            if not self._leaders[key]:
                del self._leaders[key]
        reqs = list(self._of.pop(leader, ()))
        for req in reqs:
            del self._followers[req]
        return reqs

    def forget(self, req: Req) -> None:
        leader = self._followers.pop(req)
        del self._of[leader][req]

    def _first_page(self, req: Req) -> tuple[CacheNamespace, bytes]:
        return req.cache_namespace, req.prompt_ids[: self._ledger.page_size].tobytes()

    def _common(self, req: Req, leader: Req) -> int:
        """Whole pages of prompt that `leader` computes and `req` could use."""
        key: Int64Array = req.cache_key(min(req.num_prompt - 1, leader.num_prompt))
        same = key == leader.prompt_ids[: len(key)]
        common = len(key) if same.all() else int(np.argmin(same))
        return common // self._ledger.page_size * self._ledger.page_size


def _sum(first: Demand, second: Demand) -> Demand:
    return [a + b for a, b in zip(first, second, strict=True)]


def _missing(req: Req) -> int:
    return len(req.fill_ids) - req.submitted_len
