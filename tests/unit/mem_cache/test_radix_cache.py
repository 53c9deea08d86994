"""What the radix cache does in cases that each have a name; any sequence of calls: `test_radix_machine.py`."""

from __future__ import annotations

import numpy as np
import pytest

from sterna.mem_cache.allocator import SlotPools
from sterna.mem_cache.prefix_cache import PrefixMatch
from sterna.mem_cache.radix_cache import RadixCache
from sterna.protocol.generate import CacheNamespace

PAGE = 4
NUM_PAGES = 24
NAMESPACES = [CacheNamespace(), CacheNamespace(salt="a"), CacheNamespace(adapter="a")]


def insert_new(cache: RadixCache, pools: SlotPools, tokens: list[int], namespace: CacheNamespace = NAMESPACES[0]) -> PrefixMatch:
    slots = pools.alloc(len(tokens) // PAGE)
    return cache.insert(namespace, np.array(tokens, dtype=np.int64), slots, 0)


def test_namespaces_share_nothing() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    tokens = list(range(8))
    insert_new(cache, pools, tokens, CacheNamespace(salt="x"))
    key = np.array(tokens, dtype=np.int64)
    assert cache.match(CacheNamespace(salt="x"), key, 8).length == 8
    assert cache.match(CacheNamespace(salt="y"), key, 8).length == 0
    assert cache.match(CacheNamespace(), key, 8).length == 0


def test_elements_are_compared_in_all_their_64_bits() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    insert_new(cache, pools, [5, 6, 7, 8])
    high = np.array([5, 6, 7, 8 + (1 << 40)], dtype=np.int64)
    assert cache.match(NAMESPACES[0], high, 4).length == 0


def test_duplicates_are_freed_and_the_first_copy_is_kept() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    first = insert_new(cache, pools, list(range(8)))
    second = insert_new(cache, pools, list(range(12)))
    assert second.slots[0][:8].tolist() == first.slots[0].tolist()
    assert pools.available == 64 - 12


def test_inserting_behind_a_prefix_that_is_not_there_is_refused() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    slots = pools.alloc(2)
    with pytest.raises(ValueError, match="not locked"):
        cache.insert(NAMESPACES[0], np.arange(8, dtype=np.int64), slots, 4)


def test_unlocking_twice_is_refused() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    match = insert_new(cache, pools, [1, 2, 3, 4])
    cache.lock(match.node, ())
    cache.unlock(match.node, ())
    with pytest.raises(ValueError, match="more often"):
        cache.unlock(match.node, ())


def test_the_version_changes_with_what_can_be_matched() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    versions = [cache.version]
    insert_new(cache, pools, [1, 2, 3, 4])
    versions.append(cache.version)
    cache.flush()
    versions.append(cache.version)
    assert len(set(versions)) == 3
    assert pools.available == 64


def test_what_was_used_longest_ago_goes_first() -> None:
    pools = SlotPools((64,), PAGE)
    cache = RadixCache(pools)
    keys = {name: np.array([ord(name)] * PAGE, dtype=np.int64) for name in "abc"}
    for key in keys.values():
        insert_new(cache, pools, key.tolist())
    held = cache.match(NAMESPACES[0], keys["b"], PAGE)
    cache.lock(held.node, ())
    cache.match(NAMESPACES[0], keys["c"], PAGE)
    cache.unlock(held.node, ())
    cache.match(NAMESPACES[0], keys["a"], PAGE)
    gone = []
    while cache.evictable_size:
        assert cache.evict(0, 1) == PAGE
        gone += [name for name, key in keys.items() if name not in gone and not cache.match_length(NAMESPACES[0], key, PAGE)]
    assert gone == ["b", "c", "a"]


def test_a_short_prefix_does_not_keep_the_arrays_of_the_long_key_that_it_came_from() -> None:
    pools = SlotPools((NUM_PAGES * PAGE,), PAGE)
    cache = RadixCache(pools)
    namespace = CacheNamespace()
    key = np.arange(16 * PAGE, dtype=np.int64)
    cache.insert(namespace, key, pools.alloc(16), 0)
    head = cache.match(namespace, key[:PAGE], PAGE).node
    tail = next(iter(head.children.values()))
    for node, length in ((head, PAGE), (tail, 15 * PAGE)):
        assert all(array.base is None and len(array) == length for array in (node.key, *node.slots))
