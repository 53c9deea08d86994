"""Whose KV is whose: the only place where slots change hands between requests, the prefix cache and the free pages.

The row of `req_to_token` of one request, by position:

    0               tree_len            kv_len             allocated_len        max_context
    │ the cache's,    │ its own,          │ its own,           │ nobody's
    │ locked by it    │ computed          │ not yet written    │

`tree_len` and `allocated_len` are whole pages. Prompt KV goes to the cache after every chunk, generated KV at the end, and only
where the executor says that generated KV may serve a prompt.
"""

from __future__ import annotations

import numpy as np

from sterna.executor.base import GroupSlots
from sterna.mem_cache.allocator import Int32Array, OutOfSlots, SlotPools
from sterna.mem_cache.prefix_cache import PrefixCache, PrefixMatch
from sterna.mem_cache.req_to_token import ReqToToken
from sterna.scheduler.req import Req


class KVLedger:
    def __init__(self, pools: SlotPools, tables: ReqToToken, cache: PrefixCache, *, reuse_generated_kv: bool) -> None:
        self.pools = pools
        self.tables = tables
        self.cache = cache
        self.page_size = pools.page_size
        self._reuse_generated_kv = reuse_generated_kv
        self._lanes = np.arange(self.page_size)
        self.owned = 0
        """Tokens of pages that requests own."""

    @property
    def obtainable(self) -> int:
        """Tokens that can be allocated now, evicting what nobody holds."""
        return self.pools.available + self.cache.evictable_size

    @property
    def used(self) -> int:
        """Tokens that live requests hold or lock."""
        return self.owned + self.cache.protected_size

    def whole_pages(self, length: int) -> int:
        """`length` rounded up."""
        return -(-length // self.page_size) * self.page_size

    # ---- a request's life ----

    def match_limit(self, req: Req) -> int:
        """How much of `req` may come from the cache: the last token is always computed, for its logits, and generated tokens only
        come from where generated KV is as good as a prompt's."""
        usable = req.num_tokens - 1
        return usable if self._reuse_generated_kv else min(usable, req.num_prompt)

    def match(self, req: Req) -> PrefixMatch:
        limit = self.match_limit(req)
        return self.cache.match(req.cache_namespace, req.cache_key(limit), limit)

    def open(self, req: Req, match: PrefixMatch, demand: int) -> bool:
        """Give `req` a row that begins with `match`, which it locks, if `demand` more tokens can then be had; False changes nothing."""
        self.cache.lock(match.node)
        if demand > self.obtainable or not self.tables.available:
            self.cache.unlock(match.node)
            return False
        req.req_pool_idx = self.tables.alloc_row()
        req.node = match.node
        req.tree_len = req.allocated_len = req.kv_len = match.length
        req.fill_ids = req.all_ids()
        self.tables.write(req.req_pool_idx, 0, match.slots)
        return True

    def grow(self, req: Req, length: int) -> None:
        """Allocate up to `length` positions. Raises OutOfSlots; then nothing has changed."""
        missing = self.whole_pages(length) - req.allocated_len
        if missing > 0:
            self._make_room(missing)
            slots = self.pools.alloc(missing // self.page_size)
            start = req.allocated_len
            req.allocated_len += missing
            self.owned += missing
            self.tables.write(req.req_pool_idx, start, slots)

    def grow_by_page(self, reqs: list[Req]) -> None:
        """One page more for each of `reqs`. Raises OutOfSlots; then nothing has changed."""
        if not reqs:
            return
        self._make_room(len(reqs) * self.page_size)
        rows = np.array([req.req_pool_idx for req in reqs])[:, None]
        columns = np.array([req.allocated_len for req in reqs])[:, None] + self._lanes
        for table, slots in zip(self.tables.tables, self.pools.alloc(len(reqs)), strict=True):
            table[rows, columns] = slots.reshape(len(reqs), self.page_size)
        for req in reqs:
            req.allocated_len += self.page_size
        self.owned += len(reqs) * self.page_size

    def _make_room(self, tokens: int) -> None:
        short = tokens - self.pools.available
        if short > 0 and self.cache.evict(short) < short:
            raise OutOfSlots(f"{tokens} tokens wanted, {self.pools.available} free")

    def cache_computed(self, req: Req, *, in_flight: bool = False) -> None:
        """Hand `req`'s computed whole pages to the cache and read them from there from now on.

        `in_flight`: a step reads its row right now, so none of its slots may change. Where the cache has such pages already, and would have
        it read those, this is left for later.
        """
        length = req.kv_len if self._reuse_generated_kv else min(req.kv_len, req.num_prompt)
        if length // self.page_size * self.page_size <= req.tree_len:
            return
        row, key = req.req_pool_idx, req.cache_key(length)
        if in_flight and self.cache.match_length(req.cache_namespace, key, length) > req.tree_len:
            return
        match = self.cache.insert(req.cache_namespace, key, self.tables.read(row, 0, length), req.tree_len)
        gained = match.length - req.tree_len
        if gained <= 0:
            return
        start = req.tree_len
        # From here on they are the cache's, whatever fails below: `close` must not free them.
        req.tree_len = match.length
        self.owned -= gained
        self.tables.write(row, start, tuple(own[start:] for own in match.slots))
        self.cache.lock(match.node)
        held, req.node = req.node, match.node
        assert held is not None
        self.cache.unlock(held)

    def close(self, req: Req) -> None:
        """Take everything back from `req`, its row included. What of it should outlive it has been handed to the cache before."""
        if req.node is None:
            return
        self.pools.free(self.tables.read(req.req_pool_idx, req.tree_len, req.allocated_len))
        self.owned -= req.allocated_len - req.tree_len
        self.cache.unlock(req.node)
        self.tables.free_row(req.req_pool_idx)
        req.node = None
        req.req_pool_idx = -1
        req.kv_len = req.tree_len = req.allocated_len = 0

    # ---- for a step ----

    def group_slots(self, rows: Int32Array, columns: Int32Array) -> tuple[GroupSlots, ...]:
        """Where tokens at (row, position) lie; both (T,)."""
        return tuple(GroupSlots(table[rows, columns], table) for table in self.tables.tables)
