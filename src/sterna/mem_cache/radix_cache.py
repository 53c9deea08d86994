"""The radix prefix cache: a tree of page-aligned keys, each node holding the KV slots of its stretch.

    root ── "system prompt" (lock_ref 2) ──┬── "question A" (lock_ref 1, being answered)
                                           ├── "question B" (lock_ref 1)
                                           └── "question C" (lock_ref 0: a leaf that may be evicted)

A lock counts on every node up to the root, so an unlocked node has only unlocked descendants. Evicted are unlocked leaves, the one
used longest ago first; its parent may then be the next. "Used" is a count of calls, not a clock.
"""

from __future__ import annotations

import heapq

import numpy as np

from sterna.mem_cache.allocator import Int64Array, SlotArrays, SlotPools
from sterna.mem_cache.prefix_cache import PrefixCache, PrefixMatch, PrefixNode
from sterna.protocol.generate import CacheNamespace

ChildKey = tuple[CacheNamespace, bytes]


class RadixNode(PrefixNode):
    """One stretch of a key. `children` are told apart by their first page (and, at the root, by their namespace)."""

    __slots__ = ("child_key", "children", "key", "last_access", "lock_ref", "parent", "queued", "serial", "slots")

    def __init__(self, parent: RadixNode | None, child_key: ChildKey, key: Int64Array, slots: SlotArrays, serial: int) -> None:
        self.parent = parent
        self.child_key = child_key
        self.key = key
        self.slots = slots
        self.serial = serial
        self.children: dict[ChildKey, RadixNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.queued = False
        """Whether it has its one entry in the eviction heap."""


class RadixCache(PrefixCache):
    def __init__(self, pools: SlotPools) -> None:
        self._pools = pools
        self._page_size = pools.page_size
        self._serial = 0
        self._clock = 0
        empty = tuple(np.zeros(0, dtype=np.int32) for _ in pools.groups)
        self._empty = empty
        self._root = RadixNode(None, (CacheNamespace(), b""), np.zeros(0, dtype=np.int64), empty, 0)
        self._root.lock_ref = 1  # never evicted
        self._evictable = 0
        self._protected = 0
        # Every unlocked leaf has an entry; entries of other nodes, or with an old time, are mended when they come up.
        self._heap: list[tuple[int, int, RadixNode]] = []

    @property
    def evictable_size(self) -> int:
        return self._evictable

    @property
    def protected_size(self) -> int:
        return self._protected

    def match(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> PrefixMatch:
        return self._walk(namespace, key[: self._whole_pages(min(limit, len(key)))])

    def match_length(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> int:
        key = key[: self._whole_pages(min(limit, len(key)))]
        node, length = self._root, 0
        while length < len(key):
            child = node.children.get(self._child_key(namespace, key, length))
            if child is None:
                break
            common = self._common(child.key, key[length:])
            length += common
            if common < len(child.key):
                break
            node = child
        return length

    def insert(self, namespace: CacheNamespace, key: Int64Array, slots: SlotArrays, owned_from: int) -> PrefixMatch:
        end = self._whole_pages(len(key))
        match = self._walk(namespace, key[:end])
        if match.length < min(owned_from, end):
            raise ValueError("the caller's prefix isn't in the cache: it was not locked")
        self._pools.free(tuple(own[owned_from : match.length] for own in slots))
        if match.length == end:
            return match
        parent = match.node
        assert isinstance(parent, RadixNode)
        new = tuple(own[match.length : end].copy() for own in slots)
        leaf = self._add(parent, self._child_key(namespace, key, match.length), key[match.length : end].copy(), new)
        leaf.last_access = self._clock
        self._evictable += len(leaf.key)
        self._queue(leaf)
        self.version += 1
        return PrefixMatch(end, tuple(np.concatenate(pair) for pair in zip(match.slots, new, strict=True)), leaf)

    def lock(self, node: PrefixNode) -> None:
        assert isinstance(node, RadixNode)
        at = node
        while at.parent is not None:
            if at.lock_ref == 0:
                self._evictable -= len(at.key)
                self._protected += len(at.key)
            at.lock_ref += 1
            at = at.parent

    def unlock(self, node: PrefixNode) -> None:
        assert isinstance(node, RadixNode)
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

    def evict(self, num_tokens: int) -> int:
        freed = 0
        while freed < num_tokens and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.lock_ref or node.children:
                continue  # it gets a new entry when it is an unlocked leaf again
            if used != node.last_access:
                self._queue(node)
                continue
            freed += len(node.key)
            self._remove(node)
        return freed

    def owned_slots(self) -> SlotArrays:
        parts = [self._empty]
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            parts.append(node.slots)
            stack.extend(node.children.values())
        return tuple(np.concatenate(group) for group in zip(*parts, strict=True))

    # ---- the tree ----

    def _walk(self, namespace: CacheNamespace, key: Int64Array) -> PrefixMatch:
        """Match `key` (whole pages), splitting a node that it leaves half way. Marks the path as used now."""
        self._clock += 1
        node, length = self._root, 0
        parts = [self._empty]
        while length < len(key):
            child = node.children.get(self._child_key(namespace, key, length))
            if child is None:
                break
            common = self._common(child.key, key[length:])
            if common < len(child.key):
                child = self._split(child, common)
            child.last_access = self._clock
            parts.append(child.slots)
            node = child
            length += common
        return PrefixMatch(length, tuple(np.concatenate(group) for group in zip(*parts, strict=True)), node)

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Put a new node with the first `length` elements above `node`, which keeps the rest, its children and its identity."""
        parent = node.parent
        assert parent is not None
        # Copies: a view would keep the whole stretch in memory for as long as either half lives.
        upper = self._add(parent, node.child_key, node.key[:length].copy(), tuple(own[:length].copy() for own in node.slots))
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        node.parent = upper
        node.key = node.key[length:].copy()
        node.slots = tuple(own[length:].copy() for own in node.slots)
        node.child_key = self._child_key(node.child_key[0], node.key, 0)
        upper.children[node.child_key] = node
        return upper

    def _add(self, parent: RadixNode, child_key: ChildKey, key: Int64Array, slots: SlotArrays) -> RadixNode:
        self._serial += 1
        node = RadixNode(parent, child_key, key, slots, self._serial)
        parent.children[child_key] = node
        return node

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.child_key]
        self._evictable -= len(leaf.key)
        self._pools.free(leaf.slots)
        self.version += 1
        if not parent.children and parent.lock_ref == 0:
            self._queue(parent)

    def _queue(self, node: RadixNode) -> None:
        if not node.queued and not node.children:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.serial, node))

    def _child_key(self, namespace: CacheNamespace, key: Int64Array, start: int) -> ChildKey:
        return namespace, key[start : start + self._page_size].tobytes()

    def _common(self, own: Int64Array, other: Int64Array) -> int:
        """Length of the common prefix, in whole pages."""
        length = min(len(own), len(other))
        same = own[:length] == other[:length]
        return length if same.all() else self._whole_pages(int(same.argmin()))

    def _whole_pages(self, length: int) -> int:
        return length // self._page_size * self._page_size
