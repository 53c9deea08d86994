"""`--no-radix-cache`: nothing is shared, every request keeps its own KV until it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sterna.mem_cache.allocator import Int64Array, SlotArrays
from sterna.mem_cache.prefix_cache import PrefixCache, PrefixMatch, PrefixNode
from sterna.protocol.generate import CacheNamespace


class ChunkCache(PrefixCache):
    shares = False

    def __init__(self, num_groups: int) -> None:
        empty = tuple(np.zeros(0, dtype=np.int32) for _ in range(num_groups))
        self._nothing = PrefixMatch(0, empty, PrefixNode())

    def evictable(self, group: int) -> int:
        return 0

    def protected(self, group: int) -> int:
        return 0

    def match(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> PrefixMatch:
        return self._nothing

    def match_length(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> int:
        return 0

    def known_length(self, namespace: CacheNamespace, key: Int64Array) -> int:
        return 0

    def insert(self, namespace: CacheNamespace, key: Int64Array, slots: SlotArrays, owned_from: int) -> PrefixMatch:
        return self._nothing

    def lock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        pass

    def unlock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        pass

    def advance(self, node: PrefixNode, window: int, start: int, new_start: int) -> None:
        pass

    def evict(self, group: int, num_tokens: int) -> int:
        return 0

    def owned_slots(self) -> SlotArrays:
        return self._nothing.slots

    def flush(self) -> int:
        return 0
