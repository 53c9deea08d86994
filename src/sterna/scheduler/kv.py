"""Whose KV is whose: the only place where slots change hands between requests, the prefix cache and the free pages.

The row of `req_to_token` of one request, by position:

    0               tree_len            kv_len             allocated_len        max_context
    │ the cache's,    │ its own,          │ its own,           │ nobody's
    │ locked by it    │ computed          │ not yet written    │

`tree_len` and `allocated_len` are whole pages. A request may begin within a page of its own, of which the cache has the beginning: its
first step then copies that page, which it has locked as well until then. Prompt KV goes to the cache after every chunk, generated KV
at the end, and only where the executor says that generated KV may serve a prompt.

In a group with a window the request holds all this from its window start on only, which follows `kv_len` as steps return; what is before
is nobody's if it was the request's own, and the cache's to evict if it was locked. Its entries in the row mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sterna.executor.base import GroupSlots
from sterna.mem_cache.allocator import NO_SLOT, Int32Array, OutOfSlots, SlotArrays, SlotPools
from sterna.mem_cache.prefix_cache import UNKNOWN, PrefixCache, PrefixMatch
from sterna.mem_cache.req_to_token import ReqToToken
from sterna.mem_cache.window import most_window_tokens
from sterna.scheduler.req import Req

Demand = list[int]
"""Tokens, per KV group."""


class KVLedger:
    def __init__(self, pools: SlotPools, tables: ReqToToken, cache: PrefixCache, *, reuse_generated_kv: bool) -> None:
        self.pools = pools
        self.tables = tables
        self.cache = cache
        self.page_size = pools.page_size
        self._reuse_generated_kv = reuse_generated_kv
        self._lanes = np.arange(self.page_size)
        self.owned = [0] * len(pools.groups)
        """Per group, tokens of pages that requests own."""

    @property
    def obtainable(self) -> int:
        """Tokens that can be allocated now in every group, evicting what nobody holds."""
        return min(self._obtainable(group) for group in range(len(self.owned)))

    @property
    def used(self) -> int:
        """Tokens that live requests hold or lock in the first group."""
        return self.owned[0] + self.cache.protected_size

    def _obtainable(self, group: int) -> int:
        return self.pools.groups[group].available + self.cache.evictable(group)

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

    def demand(self, tokens: int, length: int, chunk: int) -> Demand:
        """What of each group a request takes beyond what it has with `length` computed tokens, when it goes on by `tokens`, at most `chunk`
        of them in one step."""
        demand = [tokens] * len(self.owned)
        for (group, window), start in zip(self.pools.windows, self.pools.window_starts(length), strict=True):
            demand[group] = min(tokens, max(0, most_window_tokens(window, chunk, self.page_size) - (length - start)))
        return demand

    def open(self, req: Req, match: PrefixMatch, demand: Demand) -> bool:
        """Give `req` a row that begins with `match`, which it locks, if `demand` can then be had; False takes nothing.

        Its partial page is passed over where memory is too short to hold that too.
        """
        partial = match.partial
        node = match.node if partial is None else partial.node
        starts = self.pools.window_starts(match.length)
        self.cache.lock(node, starts)
        if not self.tables.available or any(tokens > self._obtainable(group) for group, tokens in enumerate(demand)):
            self.cache.unlock(node, starts)
            return partial is not None and self.open(req, replace(match, partial=None), demand)
        req.req_pool_idx = self.tables.alloc_row()
        req.node = node
        req.window_starts = starts
        req.tree_len = req.allocated_len = req.kv_len = match.length
        req.fill_ids = req.all_ids()
        self.tables.write(req.req_pool_idx, 0, match.slots)
        if partial is not None:
            try:
                self.grow(req, match.length + partial.length)
            except OutOfSlots:  # a group's demand may be less than a page
                self.close(req)
                return self.open(req, replace(match, partial=None), demand)
            req.match_node = match.node
            req.kv_len = req.copied_len = match.length + partial.length
            req.copied_from = partial.first_slots
        return True

    def end_copy(self, req: Req) -> None:
        """`req`'s first step, which copied a page, has been read: it holds that no longer."""
        held, req.node, req.match_node, req.copied_from = req.node, req.match_node, None, ()
        assert held is not None
        assert req.node is not None
        self.cache.lock(req.node, req.window_starts)
        self.cache.unlock(held, req.window_starts)

    def grow(self, req: Req, length: int) -> None:
        """Allocate up to `length` positions. Raises OutOfSlots; then nothing has changed."""
        missing = self.whole_pages(length) - req.allocated_len
        if missing > 0:
            self._make_room(missing)
            slots = self.pools.alloc(missing // self.page_size)
            start = req.allocated_len
            req.allocated_len += missing
            self._own(missing)
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
        self._own(len(reqs) * self.page_size)

    def _make_room(self, tokens: int) -> None:
        for group, pool in enumerate(self.pools.groups):
            short = tokens - pool.available
            if short > 0 and self.cache.evict(group, short) < short:
                raise OutOfSlots(f"{tokens} tokens wanted, {pool.available} free in group {group}")

    def _own(self, tokens: int) -> None:
        for group in range(len(self.owned)):
            self.owned[group] += tokens

    def cache_computed(self, req: Req, *, in_flight: bool = False, last: bool = False) -> None:
        """Hand `req`'s computed whole pages to the cache and read them from there from now on.

        `in_flight`: a step reads its row right now, so none of its slots may change. Where the cache has such pages already, and would have
        it read those, this is left for later. `last`: it computes no more, and a page that it has only begun goes as well: whoever goes on
        from there, as the next turn of a conversation does, copies its beginning.
        """
        if req.copied_from:
            return  # the page that it begins within isn't there yet
        length = req.kv_len if self._reuse_generated_kv else min(req.kv_len, req.num_prompt)
        end = self.whole_pages(length) if last else length // self.page_size * self.page_size
        if end <= req.tree_len:
            return
        row, key = req.req_pool_idx, req.cache_key(min(length, end))
        if last:
            key = np.pad(key, (0, end - length), constant_values=UNKNOWN)
        if in_flight and self.cache.known_length(req.cache_namespace, key) > req.tree_len:
            return
        match = self.cache.insert(req.cache_namespace, key, self._held_slots(req, end), req.tree_len)
        if match.length <= req.tree_len:
            return
        start = req.tree_len
        before = self.owned_from(req)
        # From here on they are the cache's, whatever fails below: `close` must not free them.
        req.tree_len = match.length
        for group, (old, new) in enumerate(zip(before, self.owned_from(req), strict=True)):
            self.owned[group] -= new - old
        self.tables.write(row, start, tuple(own[start:] for own in match.slots))
        self.cache.lock(match.node, req.window_starts)
        held, req.node = req.node, match.node
        assert held is not None
        self.cache.unlock(held, req.window_starts)

    def free_behind(self, reqs: Sequence[Req], lengths: Sequence[int]) -> None:
        """Give back what of each of `reqs` lies behind the windows of its query at the position in `lengths`.

        Only once the step that computed the token before it has returned its result: all of the request's queries that may still read, in
        flight or to come, are then there or later.
        """
        behind: list[list[Int32Array]] = [[] for _ in self.pools.windows]
        for req, length in zip(reqs, lengths, strict=True):
            starts = self.pools.window_starts(length)
            if starts == req.window_starts:
                continue
            assert req.node is not None
            row, tree_len = req.req_pool_idx, req.tree_len
            for index, ((group, _), old, new) in enumerate(zip(self.pools.windows, req.window_starts, starts, strict=True)):
                if old < tree_len:
                    self.cache.advance(req.node, index, old, min(new, tree_len))
                if max(old, tree_len) < new:
                    behind[index].append(self.tables.tables[group][row, max(old, tree_len) : new])
            req.window_starts = starts
        for (group, _), slots in zip(self.pools.windows, behind, strict=True):
            if slots:
                freed = np.concatenate(slots)
                self.pools.groups[group].free(freed)
                self.owned[group] -= len(freed)

    def close(self, req: Req) -> None:
        """Take everything back from `req`, its row included. What of it should outlive it has been handed to the cache before."""
        if req.node is None:
            return
        row, end = req.req_pool_idx, req.allocated_len
        for group, (table, start) in enumerate(zip(self.tables.tables, self.owned_from(req), strict=True)):
            self.pools.groups[group].free(table[row, start:end])
            self.owned[group] -= end - start
        self.cache.unlock(req.node, req.window_starts)
        self.tables.free_row(row)
        req.node = req.match_node = None
        req.req_pool_idx = -1
        req.kv_len = req.tree_len = req.allocated_len = req.copied_len = 0
        req.window_starts = req.copied_from = ()

    def owned_from(self, req: Req) -> list[int]:
        """Per group, from which position on `req` owns its slots."""
        starts = [req.tree_len] * len(self.owned)
        for (group, _), start in zip(self.pools.windows, req.window_starts, strict=True):
            starts[group] = max(start, req.tree_len)
        return starts

    def _held_slots(self, req: Req, length: int) -> SlotArrays:
        """Of `req`'s first `length` tokens, what it holds of them."""
        slots = self.tables.read(req.req_pool_idx, 0, length)
        for (group, _), start in zip(self.pools.windows, req.window_starts, strict=True):
            slots[group][:start] = NO_SLOT
        return slots

    # ---- for a step ----

    def group_slots(self, rows: Int32Array, columns: Int32Array, copying: Sequence[Req] = ()) -> tuple[GroupSlots, ...]:
        """Where tokens at (row, position) lie; both (T,). `copying`: whose first step this is, if they begin within a copied page."""
        if not copying:
            return tuple(GroupSlots(table[rows, columns], table) for table in self.tables.tables)
        to_rows, to_columns = [req.req_pool_idx for req in copying], [req.copied_len // self.page_size * self.page_size for req in copying]
        sources = np.array([req.copied_from for req in copying], dtype=np.int32).T
        return tuple(
            GroupSlots(table[rows, columns], table, source, table[to_rows, to_columns])
            for table, source in zip(self.tables.tables, np.ascontiguousarray(sources), strict=True)
        )
