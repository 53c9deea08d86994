"""Who may use which KV slot next: free pages, per KV group.

A page is an aligned run of `page_size` slots; slots are handed out and taken back in whole pages, O(pages).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sterna.mem_cache.window import UNLIMITED, least_window_tokens, window_start

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
SlotArrays = tuple[Int32Array, ...]
"""Slots of the same tokens in each KV group, one array a group, all of one length. In a group with a window a page may be missing."""
NO_SLOT = -1
"""In place of the slots of a page that is missing."""


class OutOfSlots(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class SlotError(Exception):
    """Slots were given back that aren't whole pages or are free already: a fault of ours, caught before it can corrupt a neighbour."""


class PagedAllocator:
    """The free pages of one group, last freed first used."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_slots // page_size
        self._free = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self._is_free = np.ones(self.num_pages, dtype=np.bool_)
        self._order = np.zeros(self.num_pages, dtype=np.int32)
        self._lanes = np.arange(page_size, dtype=np.int32)

    @property
    def total(self) -> int:
        """Slots in all; a remainder of the pool that doesn't fill a page is unused."""
        return self.num_pages * self.page_size

    @property
    def available(self) -> int:
        """Free slots."""
        return self._num_free * self.page_size

    def alloc(self, num_pages: int) -> Int32Array:
        """(num_pages * page_size,) slots, page after page. Raises OutOfSlots."""
        if num_pages > self._num_free:
            raise OutOfSlots(f"{num_pages} pages wanted, {self._num_free} free")
        left = self._num_free - num_pages
        pages = self._free[left : self._num_free][::-1]
        self._is_free[pages] = False
        self._num_free = left
        return (pages[:, None] * np.int32(self.page_size) + self._lanes).reshape(-1)

    def free(self, slots: Int32Array) -> None:
        """Give back whole pages, each as its slots in order. Raises SlotError and changes nothing where that isn't what `slots` is."""
        if len(slots) == 0:
            return
        if len(slots) % self.page_size:
            raise SlotError(f"{len(slots)} slots are not whole pages of {self.page_size}")
        firsts = slots[:: self.page_size]
        pages = firsts // self.page_size
        if (firsts % self.page_size).any() or (slots[self.page_size - 1 :: self.page_size] - firsts != self.page_size - 1).any():
            raise SlotError("slots are not aligned pages")
        if pages.min() < 0 or pages.max() >= self.num_pages or self._is_free[pages].any():
            raise SlotError("a page is free already or doesn't exist")
        order = np.arange(len(pages), dtype=np.int32)
        self._order[pages] = order
        if (self._order[pages] != order).any():
            raise SlotError("a page is given back twice")
        self._is_free[pages] = True
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def free_slots(self) -> Int32Array:
        """Every free slot; for the ownership check."""
        return (self._free[: self._num_free, None] * np.int32(self.page_size) + self._lanes).reshape(-1)


class SlotPools:
    """The allocators of all KV groups. A token gets a slot in each; in a group with a window it gives that back earlier."""

    def __init__(self, group_slots: tuple[int, ...], page_size: int, group_windows: tuple[int | None, ...] | None = None) -> None:
        """`group_windows`: per group, its window in tokens or None; by default no group has one."""
        self.page_size = page_size
        self.groups = tuple(PagedAllocator(num_slots, page_size) for num_slots in group_slots)
        windows = group_windows or (None,) * len(group_slots)
        self.windows = tuple((group, window) for group, window in enumerate(windows) if window is not None)
        """(group, window) of each group that has one."""

    @property
    def total(self) -> int:
        """Tokens that the first group holds."""
        return self.groups[0].total

    @property
    def available(self) -> int:
        """Tokens for which every group has a free slot."""
        return min(group.available for group in self.groups)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that could run here, alone."""
        longest = [group.total for group in self.groups]
        for group, window in self.windows:
            if longest[group] >= least_window_tokens(window, self.page_size):
                longest[group] = UNLIMITED
        return min(longest)

    def window_starts(self, length: int) -> tuple[int, ...]:
        """Per group with a window: the first position that a request with `length` computed tokens keeps."""
        return tuple([window_start(length, window, self.page_size) for _, window in self.windows])

    def alloc(self, num_pages: int) -> SlotArrays:
        """Raises OutOfSlots, and then takes from no group."""
        if num_pages * self.page_size > self.available:
            raise OutOfSlots(f"{num_pages} pages wanted, {self.available // self.page_size} free")
        return tuple(group.alloc(num_pages) for group in self.groups)

    def free(self, slots: SlotArrays) -> None:
        """Per group, slots of that group: not necessarily of the same tokens."""
        for group, own in zip(self.groups, slots, strict=True):
            group.free(own)
