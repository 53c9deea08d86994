"""The radix prefix cache: a tree of page-aligned keys, each node holding the KV slots of its stretch.

    root ── "system prompt" (lock_ref 2) ──┬── "question A" (lock_ref 1, being answered)
                                           ├── "question B" (lock_ref 1)
                                           └── "question C" (lock_ref 0: a leaf that may be evicted)

A lock counts on every node up to the root, so an unlocked node has only unlocked descendants. Evicted are unlocked leaves, the one
used longest ago first; its parent may then be the next. "Used" is a count of calls, not a clock. Groups with a window have books of
their own (`window_books.py`): there a node may lose its pages and stay, and locks hold no more than a window.

Where no group is full, the tree's nodes cost keys alone: those that have no page left go, and keys are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from sterna.mem_cache.allocator import Int32Array, Int64Array, SlotArrays, SlotPools
from sterna.mem_cache.eviction import EvictionQueue
from sterna.mem_cache.prefix_cache import PartialPage, PrefixCache, PrefixMatch, PrefixNode
from sterna.mem_cache.radix_node import ChildKey, RadixNode
from sterna.mem_cache.window_books import WindowBooks
from sterna.protocol.generate import CacheNamespace

KEYS_PER_SLOT = 8
"""Tokens in the tree at most for each slot, where no group is full."""
CHILDREN_COMPARED = 32
"""Of a node, the newest, whatever their namespace: in search of a page that begins as a key goes on."""


class RadixCache(PrefixCache):
    def __init__(self, pools: SlotPools) -> None:
        self._pools = pools
        self._page_size = pools.page_size
        self._serial = 0
        self._clock = 0
        self._empty = tuple(np.zeros(0, dtype=np.int32) for _ in pools.groups)
        self._root = RadixNode(None, (CacheNamespace(), b""), 0, np.zeros(0, dtype=np.int64), list(self._empty), 0, 0)
        self._root.lock_ref = 1  # never evicted
        # Tokens in unlocked and in locked nodes: what a full group has there.
        self._evictable = 0
        self._protected = 0
        # Every unlocked leaf has an entry.
        self._leaves: EvictionQueue[RadixNode] = EvictionQueue()
        self._books = tuple(WindowBooks(pools, index) for index in range(len(pools.windows)))
        self._books_of = {books.group: books for books in self._books}
        self._full = [group for group in range(len(pools.groups)) if group not in self._books_of]
        self._most_keys = KEYS_PER_SLOT * sum(group.total for group in pools.groups)

    def evictable(self, group: int) -> int:
        return self._books_of[group].evictable if group in self._books_of else self._evictable

    def protected(self, group: int) -> int:
        return self._books_of[group].protected if group in self._books_of else self._protected

    # ---- matching ----

    def match(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> PrefixMatch:
        key = key[: max(limit, 0)]
        path, length = self._descend(namespace, key[: self._whole_pages(len(key))])
        match = self._end_at(path, self._continuable(path, length))
        return match if match.length < length else self._with_partial_page(match, namespace, key[length : length + self._page_size])

    def match_length(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> int:
        return self._continuable(*self._descend(namespace, key[: self._whole_pages(min(limit, len(key)))]))

    def known_length(self, namespace: CacheNamespace, key: Int64Array) -> int:
        return self._descend(namespace, key[: self._whole_pages(len(key))])[1]

    def _descend(self, namespace: CacheNamespace, key: Int64Array) -> tuple[list[RadixNode], int]:
        """The nodes that `key` (whole pages) goes along, and how far: perhaps only half way into the last. Changes nothing."""
        node, length = self._root, 0
        path: list[RadixNode] = []
        while length < len(key):
            child = node.children.get(self._child_key(namespace, key, length))
            if child is None:
                break
            path.append(child)
            common = self._common(child.key, key[length:])
            length += common
            if common < len(child.key):
                break
            node = child
        return path, length

    def _continuable(self, path: list[RadixNode], length: int) -> int:
        """The longest match along `path`, up to `length`, from which every group can continue."""
        if not self._books or not length:
            return length
        count = length // self._page_size
        ends = np.logical_and.reduce([books.may_end(path, count) for books in self._books])
        return (int(np.flatnonzero(ends)[-1]) + 1) * self._page_size if ends.any() else 0

    def _end_at(self, path: list[RadixNode], length: int) -> PrefixMatch:
        """The match of `path`'s first `length` tokens, splitting the node that they end in. Marks it as used now."""
        self._clock += 1
        node = self._root
        parts: list[Sequence[Int32Array]] = [self._empty]
        for node_at in path:
            if node_at.start >= length:
                break
            node = node_at if node_at.end <= length else self._split(node_at, length - node_at.start)
            node.last_access = self._clock
            parts.append(node.slots)
        for books, start in zip(self._books, self._pools.window_starts(length), strict=True):
            books.touch(node, start, self._clock)
        return PrefixMatch(length, tuple(np.concatenate(group) for group in zip(*parts, strict=True)), node)

    def _with_partial_page(self, match: PrefixMatch, namespace: CacheNamespace, rest: Int64Array) -> PrefixMatch:
        """`match`, with the page behind it that has most of `rest` in common, if every group has it there."""
        parent = match.node
        assert isinstance(parent, RadixNode)
        best, most = None, 0
        for child in islice(reversed(parent.children.values()), CHILDREN_COMPARED):
            if most == len(rest):
                break
            if child.key[most] != rest[most] or child.child_key[0] != namespace or any(own[0] < 0 for own in child.slots):
                continue
            same = child.key[: len(rest)] == rest
            common = len(rest) if same.all() else int(same.argmin())
            if common > most:
                best, most = child, common
        if best is None:
            return match
        page = best if len(best.key) == self._page_size else self._split(best, self._page_size)
        page.last_access = self._clock
        for books in self._books:
            books.touch(page, match.length, self._clock)
        return replace(match, partial=PartialPage(most, tuple(int(own[0]) for own in page.slots), page))

    # ---- insertion ----

    def insert(self, namespace: CacheNamespace, key: Int64Array, slots: SlotArrays, owned_from: int) -> PrefixMatch:
        if not self._full:
            self._bound_keys()
        end = self._whole_pages(len(key))
        path, length = self._descend(namespace, key[:end])
        if length < min(owned_from, end):
            raise ValueError("the caller's prefix isn't in the cache: it was not locked")
        for group in self._full:
            self._pools.groups[group].free(slots[group][owned_from:length])
        for books in self._books:
            self._adopt(books, path, slots[books.group], owned_from, length)
        match = self._end_at(path, length)
        if match.length == end:
            return match
        parent = match.node
        assert isinstance(parent, RadixNode)
        new = [own[length:end].copy() for own in slots]
        leaf = self._add(parent, self._child_key(namespace, key, length), length, key[length:end].copy(), new, self._clock)
        leaf.windows = tuple(books.add(leaf) for books in self._books)
        self._evictable += len(leaf.key)
        self._leaves.push(leaf)
        self.version += 1
        return PrefixMatch(end, tuple(np.concatenate(pair) for pair in zip(match.slots, new, strict=True)), leaf)

    def _adopt(self, books: WindowBooks, path: list[RadixNode], slots: Int32Array, owned_from: int, length: int) -> None:
        """Fill the gaps between `owned_from` and `length` from what the caller has computed again."""
        for node in path:
            start, stop = max(node.start, owned_from), min(node.end, length)
            if start < stop:
                books.adopt(node, slots[start:stop], start - node.start)
                self.version += 1

    # ---- locks ----

    def lock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        assert isinstance(node, RadixNode)
        for books, start in zip(self._books, window_starts, strict=True):
            books.lock(node, start)
        at = node
        while at.parent is not None:
            if at.lock_ref == 0:
                self._evictable -= len(at.key)
                self._protected += len(at.key)
            at.lock_ref += 1
            at = at.parent

    def unlock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        assert isinstance(node, RadixNode)
        for books, start in zip(self._books, window_starts, strict=True):
            books.unlock(node, start, node.end)
        at = node
        while at.parent is not None:
            if at.lock_ref == 0:
                raise ValueError("unlocked more often than locked")
            at.lock_ref -= 1
            if at.lock_ref == 0:
                self._evictable += len(at.key)
                self._protected -= len(at.key)
                self._queue(at)
            at = at.parent
        if not self._full:
            self._prune(node)

    def advance(self, node: PrefixNode, window: int, start: int, new_start: int) -> None:
        assert isinstance(node, RadixNode)
        self._books[window].unlock(node, start, new_start)

    # ---- eviction ----

    def evict(self, group: int, num_tokens: int) -> int:
        books = self._books_of.get(group)
        if books is None:
            return self._evict_leaves(num_tokens)
        freed, thinned = books.evict(num_tokens)
        self.version += bool(thinned)
        if not self._full:
            for node in thinned:
                self._prune(node)
        return freed

    def flush(self) -> int:
        before = self._pools.groups[0].available
        self._evict_leaves(self._evictable)
        for books in self._books:
            self.evict(books.group, books.evictable)
        return self._pools.groups[0].available - before

    def _evict_leaves(self, num_tokens: int) -> int:
        freed = 0
        while freed < num_tokens and (node := self._leaves.pop()) is not None:
            if node.lock_ref or node.children:
                continue  # it gets a new entry when it is an unlocked leaf again
            freed += len(node.key)
            self._remove(node)
        return freed

    def _bound_keys(self) -> None:
        self._evict_leaves(self._evictable + self._protected - self._most_keys)

    def _prune(self, node: RadixNode) -> None:
        """Remove `node`, and those above it, as long as they are unlocked leaves of which no page is left."""
        while node.alive and not node.children and not node.lock_ref and not any(books.has_any(node) for books in self._books):
            node = self._remove(node)

    def owned_slots(self) -> SlotArrays:
        parts = [self._empty]
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            parts.append(tuple(own[own >= 0] for own in node.slots))
            stack.extend(node.children.values())
        return tuple(np.concatenate(group) for group in zip(*parts, strict=True))

    # ---- the tree ----

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Put a new node with the first `length` elements above `node`, which keeps the rest, its children and its identity."""
        parent = node.parent
        assert parent is not None
        # Copies: a view would keep the whole stretch in memory for as long as either half lives.
        upper_slots = [own[:length].copy() for own in node.slots]
        upper = self._add(parent, node.child_key, node.start, node.key[:length].copy(), upper_slots, node.last_access)
        upper.lock_ref = node.lock_ref
        upper.windows = tuple(books.split(upper, node) for books in self._books)
        node.parent = upper
        node.start += length
        node.key = node.key[length:].copy()
        node.slots = [own[length:].copy() for own in node.slots]
        node.child_key = self._child_key(node.child_key[0], node.key, 0)
        upper.children[node.child_key] = node
        return upper

    def _add(self, parent: RadixNode, child_key: ChildKey, start: int, key: Int64Array, slots: list[Int32Array], used: int) -> RadixNode:
        self._serial += 1
        node = RadixNode(parent, child_key, start, key, slots, self._serial, used)
        parent.children[child_key] = node
        return node

    def _remove(self, leaf: RadixNode) -> RadixNode:
        """Free what it has. Returns its parent."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.child_key]
        self._evictable -= len(leaf.key)
        for group in self._full:
            self._pools.groups[group].free(leaf.slots[group])
        for books in self._books:
            books.remove(leaf)
        self._leaves.discard(leaf)
        self.version += 1
        if not parent.children and parent.lock_ref == 0:
            self._queue(parent)
        return parent

    def _queue(self, node: RadixNode) -> None:
        if not node.children:
            self._leaves.push(node)

    def _child_key(self, namespace: CacheNamespace, key: Int64Array, start: int) -> ChildKey:
        return namespace, key[start : start + self._page_size].tobytes()

    def _common(self, own: Int64Array, other: Int64Array) -> int:
        """Length of the common prefix, in whole pages."""
        length = min(len(own), len(other))
        same = own[:length] == other[:length]
        return length if same.all() else self._whole_pages(int(same.argmin()))

    def _whole_pages(self, length: int) -> int:
        return length // self._page_size * self._page_size
