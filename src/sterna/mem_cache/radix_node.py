"""The nodes of the radix tree."""

from __future__ import annotations

import numpy as np

from sterna.mem_cache.allocator import Int32Array, Int64Array
from sterna.mem_cache.eviction import Evictable
from sterna.mem_cache.prefix_cache import PrefixNode
from sterna.protocol.generate import CacheNamespace

ChildKey = tuple[CacheNamespace, bytes]


class RadixNode(PrefixNode, Evictable):
    """One stretch of a key. `children` are told apart by their first page (and, at the root, by their namespace)."""

    __slots__ = ("child_key", "children", "key", "lock_ref", "parent", "slots", "start", "windows")

    def __init__(
        self, parent: RadixNode | None, child_key: ChildKey, start: int, key: Int64Array, slots: list[Int32Array], serial: int, used: int
    ) -> None:
        super().__init__(serial, used)
        self.parent = parent
        """None of the root only."""
        self.child_key = child_key
        self.start = start
        """Position of its first token."""
        self.key = key
        self.slots = slots
        """(len(key),) per group; in a group with a window `NO_SLOT` where the node has lost the page, or never had it."""
        self.children: dict[ChildKey, RadixNode] = {}
        self.lock_ref = 0
        self.windows: tuple[WindowPages, ...] = ()
        """Per group with a window."""

    @property
    def end(self) -> int:
        return self.start + len(self.key)


class WindowPages(Evictable):
    """What of a node lies in one group with a window. Its `last_access` is that of the last match that could not have done without."""

    __slots__ = ("locks", "node")

    def __init__(self, node: RadixNode, locks: Int32Array, used: int) -> None:
        super().__init__(node.serial, used)
        self.node = node
        self.locks = locks
        """(pages,): how many hold each."""


def new_locks(length: int, page_size: int) -> Int32Array:
    return np.zeros(length // page_size, dtype=np.int32)
