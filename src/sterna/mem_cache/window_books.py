"""What the radix tree holds in one KV group with a window: which pages are there, which are locked, and which goes next.

A node may lose its pages here while it keeps those of the full group: what is left of it is a tombstone, over which a longer match goes
on, but at which none can end until somebody computes those tokens again. Locks count by page and not up to the root, because whoever
continues from a position needs a window's worth before it and nothing else.

    node      │ page │ page │ page │ page │     one window before `end`
    slots     │  -1  │  -1  │  48  │  16  │     two were evicted
    locks     │   0  │   0  │   0  │   2  │     one may be evicted; two hold the last
"""

from __future__ import annotations

import numpy as np

from sterna.mem_cache.allocator import NO_SLOT, Int32Array, SlotPools
from sterna.mem_cache.eviction import EvictionQueue
from sterna.mem_cache.radix_node import RadixNode, WindowPages, new_locks
from sterna.mem_cache.window import pages_seen


class WindowBooks:
    def __init__(self, pools: SlotPools, index: int) -> None:
        """Of the `index`-th group that has a window."""
        self.group, self.window = pools.windows[index]
        self.evictable = 0
        """Tokens of pages that are there and that nobody holds."""
        self.protected = 0
        self._index = index
        self._pool = pools.groups[self.group]
        self._page_size = pools.page_size
        self._lanes = np.arange(pools.page_size)
        self._queue: EvictionQueue[WindowPages] = EvictionQueue()

    # ---- nodes come, part and go ----

    def add(self, node: RadixNode) -> WindowPages:
        """Books of a new node, whose slots are the cache's from now on."""
        pages = WindowPages(node, new_locks(len(node.key), self._page_size), node.last_access)
        self._gained(pages, int(self._there(node).sum()))
        return pages

    def split(self, upper: RadixNode, lower: RadixNode) -> WindowPages:
        """Books of `upper`, which now holds what was the beginning of `lower`."""
        below = lower.windows[self._index]
        pages = WindowPages(upper, below.locks[: len(upper.key) // self._page_size].copy(), below.last_access)
        below.locks = below.locks[len(upper.key) // self._page_size :].copy()
        self._queue.push(pages)
        return pages

    def remove(self, node: RadixNode) -> None:
        """Free what `node` has here. Nobody holds any of it."""
        there = np.flatnonzero(self._there(node))
        self._lose(node, there)
        self._queue.discard(node.windows[self._index])

    def adopt(self, node: RadixNode, offered: Int32Array, at: int) -> None:
        """`offered` (n,): the caller's slots for the tokens of `node` from `at` on, `NO_SLOT` where it has none.

        The node takes the pages that it lacks and frees the others.
        """
        first = at // self._page_size
        has = offered[:: self._page_size] >= 0
        lacks = ~self._there(node)[first : first + len(has)]
        taken = np.repeat(has & lacks, self._page_size)
        node.slots[self.group][at : at + len(offered)][taken] = offered[taken]
        self._pool.free(offered[np.repeat(has & ~lacks, self._page_size)])
        self._gained(node.windows[self._index], int((has & lacks).sum()))

    def _gained(self, pages: WindowPages, count: int) -> None:
        if count:
            self.evictable += count * self._page_size
            self._queue.push(pages)

    # ---- use ----

    def may_end(self, path: list[RadixNode], count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(count,): whether a match of 1 .. `count` pages along `path` may end there: its last window is there."""
        there = np.concatenate([self._there(node) for node in path])[:count]
        ends = np.arange(1, count + 1)
        last_gap = np.maximum.accumulate(np.where(there, 0, ends))
        return last_gap <= np.maximum(ends - pages_seen(self.window, self._page_size), 0)

    def touch(self, node: RadixNode, start: int, now: int) -> None:
        """A match that ends at `node`'s end needs what is from `start` on."""
        at: RadixNode | None = node
        while at is not None and at.end > start:
            at.windows[self._index].last_access = now
            at = at.parent

    def lock(self, node: RadixNode, start: int) -> None:
        """Hold what is from `start` to `node`'s end; all of it is there."""
        at: RadixNode | None = node
        while at is not None and at.end > start:
            first = max(start - at.start, 0) // self._page_size
            if not self._there(at)[first:].all():
                raise ValueError("a page that isn't there was locked")
            locks = at.windows[self._index].locks[first:]
            newly = int((locks == 0).sum()) * self._page_size
            locks += 1
            self.evictable -= newly
            self.protected += newly
            at = at.parent

    def unlock(self, node: RadixNode, start: int, stop: int) -> None:
        """Hold no longer what is from `start` to `stop`, or to `node`'s end."""
        at: RadixNode | None = node
        while at is not None and at.end > start:
            pages = at.windows[self._index]
            locks = pages.locks[max(start - at.start, 0) // self._page_size : max(stop - at.start, 0) // self._page_size]
            if (locks == 0).any():
                raise ValueError("unlocked more often than locked")
            locks -= 1
            released = int((locks == 0).sum()) * self._page_size
            self.protected -= released
            self.evictable += released
            if released:
                self._queue.push(pages)
            at = at.parent

    # ---- eviction ----

    def evict(self, num_tokens: int) -> tuple[int, list[RadixNode]]:
        """Free at least `num_tokens`, or all that nobody holds. Returns how many, and the nodes that have lost something.

        The node used longest ago goes first, and of a node its beginning: to whoever continues from its end, that is behind the window.
        """
        freed, thinned = 0, []
        while freed < num_tokens and (pages := self._queue.pop()) is not None:
            node = pages.node
            loose = np.flatnonzero(self._there(node) & (pages.locks == 0))
            taken = loose[: -(-(num_tokens - freed) // self._page_size)]
            if len(taken) < len(loose):
                self._queue.push(pages)
            if len(taken):
                self._lose(node, taken)
                freed += len(taken) * self._page_size
                thinned.append(node)
        return freed, thinned

    def owned_slots(self, node: RadixNode) -> Int32Array:
        slots = node.slots[self.group]
        return slots[slots >= 0]

    def has_any(self, node: RadixNode) -> bool:
        return bool(self._there(node).any())

    def _lose(self, node: RadixNode, which: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        """Free those pages of `node`."""
        slots = node.slots[self.group]
        where = (which[:, None] * self._page_size + self._lanes).reshape(-1)
        self._pool.free(slots[where])
        slots[where] = NO_SLOT
        self.evictable -= len(where)

    def _there(self, node: RadixNode) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(pages,)"""
        return node.slots[self.group][:: self._page_size] >= 0
