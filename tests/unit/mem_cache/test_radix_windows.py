"""The radix cache over groups with a window, in cases that each have a name; any sequence of calls: `test_radix_machine.py`."""

from __future__ import annotations

import numpy as np
import pytest

from sterna.mem_cache.allocator import NO_SLOT, SlotPools
from sterna.mem_cache.eviction import Evictable, EvictionQueue
from sterna.mem_cache.prefix_cache import PrefixMatch
from sterna.mem_cache.radix_cache import KEYS_PER_SLOT, RadixCache
from sterna.mem_cache.radix_node import RadixNode
from sterna.protocol.generate import CacheNamespace

PAGE = 4
WINDOW = 2 * PAGE
"""A page's first position sees into two pages before it."""
FULL, WINDOWED = 0, 1
NOBODY = CacheNamespace()


def make(*windows: int | None, slots: int = 256) -> tuple[SlotPools, RadixCache]:
    pools = SlotPools((slots,) * len(windows), PAGE, windows)
    return pools, RadixCache(pools)


def insert(pools: SlotPools, cache: RadixCache, tokens: list[int], owned_from: int = 0, missing: int = 0) -> PrefixMatch:
    """`missing`: of its beginning, what the groups with a window have given back."""
    slots = [np.concatenate([np.zeros(owned_from, dtype=np.int32), each]) for each in pools.alloc((len(tokens) - owned_from) // PAGE)]
    for group, _ in pools.windows:
        pools.groups[group].free(slots[group][owned_from:missing])
        slots[group][owned_from:missing] = NO_SLOT
    return cache.insert(NOBODY, np.array(tokens, dtype=np.int64), tuple(slots), owned_from)


def length(cache: RadixCache, tokens: list[int]) -> int:
    return cache.match_length(NOBODY, np.array(tokens, dtype=np.int64), len(tokens))


def test_a_match_ends_where_the_window_before_it_is_there() -> None:
    pools, cache = make(None, WINDOW)
    tokens = list(range(10 * PAGE))
    insert(pools, cache, tokens, missing=4 * PAGE)
    assert length(cache, tokens) == 10 * PAGE
    assert length(cache, tokens[: 6 * PAGE]) == 6 * PAGE
    assert length(cache, tokens[: 5 * PAGE]) == 0
    match = cache.match(NOBODY, np.array(tokens), 6 * PAGE)
    assert (match.slots[WINDOWED] == NO_SLOT).tolist() == [True] * (4 * PAGE) + [False] * (2 * PAGE)
    assert (match.slots[FULL] >= 0).all()


def test_a_beginning_shorter_than_the_window_needs_all_of_it() -> None:
    pools, cache = make(None, WINDOW)
    insert(pools, cache, list(range(PAGE)))
    assert length(cache, list(range(PAGE))) == PAGE
    assert cache.evict(WINDOWED, 1) == PAGE
    assert length(cache, list(range(PAGE))) == 0
    assert cache.evictable(FULL) == PAGE


def test_whoever_computes_lost_tokens_again_makes_the_prefix_whole() -> None:
    pools, cache = make(None, WINDOW)
    tokens = list(range(8 * PAGE))
    kept = insert(pools, cache, tokens, missing=6 * PAGE).slots[WINDOWED][6 * PAGE :].tolist()
    match = insert(pools, cache, tokens)
    assert (match.slots[WINDOWED] >= 0).all()
    assert match.slots[WINDOWED][6 * PAGE :].tolist() == kept
    assert [pool.available for pool in pools.groups] == [256 - 8 * PAGE] * 2
    assert [length(cache, tokens[:end]) for end in range(0, 9 * PAGE, PAGE)] == list(range(0, 9 * PAGE, PAGE))


def test_who_continues_from_a_prefix_protects_all_of_it_in_a_full_group_and_a_window_of_it_in_the_other() -> None:
    pools, cache = make(None, WINDOW)
    match = insert(pools, cache, list(range(10 * PAGE)))
    cache.lock(match.node, pools.window_starts(match.length))
    assert [cache.protected(group) for group in (FULL, WINDOWED)] == [10 * PAGE, WINDOW]
    assert [cache.evict(group, 999) for group in (FULL, WINDOWED)] == [0, 8 * PAGE]
    assert length(cache, list(range(10 * PAGE))) == 10 * PAGE
    cache.advance(match.node, 0, 8 * PAGE, 9 * PAGE)
    assert cache.evict(WINDOWED, 999) == PAGE
    cache.unlock(match.node, (9 * PAGE,))
    assert cache.evict(FULL, 1) == 10 * PAGE
    assert [pool.available for pool in pools.groups] == [256, 256]


def test_a_lock_survives_a_split_in_the_middle_of_its_window() -> None:
    pools, cache = make(None, WINDOW)
    tokens = list(range(6 * PAGE))
    match = insert(pools, cache, tokens)
    cache.lock(match.node, (4 * PAGE,))
    cache.match(NOBODY, np.array(tokens[: 5 * PAGE]), 5 * PAGE)
    assert cache.protected(WINDOWED) == WINDOW
    assert cache.evict(WINDOWED, 999) == 4 * PAGE
    cache.unlock(match.node, (4 * PAGE,))
    assert cache.evict(WINDOWED, 999) == WINDOW


def test_what_is_not_there_or_not_held_cannot_be_locked_or_given_back() -> None:
    pools, cache = make(None, WINDOW)
    match = insert(pools, cache, list(range(6 * PAGE)), missing=3 * PAGE)
    with pytest.raises(ValueError, match="isn't there"):
        cache.lock(match.node, (2 * PAGE,))
    cache.lock(match.node, (4 * PAGE,))
    with pytest.raises(ValueError, match="more often"):
        cache.advance(match.node, 0, 3 * PAGE, 5 * PAGE)


def test_of_a_window_group_goes_first_what_no_match_has_needed_for_longest_and_of_that_the_beginning() -> None:
    pools, cache = make(None, WINDOW)
    old, new = [1] * (4 * PAGE), [2] * (4 * PAGE)
    insert(pools, cache, old)
    insert(pools, cache, new)
    cache.match(NOBODY, np.array(old), len(old))
    assert cache.evict(WINDOWED, 2 * PAGE) == 2 * PAGE
    assert [length(cache, new), length(cache, new[: 3 * PAGE]), length(cache, old)] == [4 * PAGE, 0, 4 * PAGE]
    assert cache.evict(WINDOWED, 1) == PAGE
    assert [length(cache, new), length(cache, old)] == [0, 4 * PAGE]


def test_a_match_does_not_keep_what_it_goes_over_but_does_not_need() -> None:
    pools, cache = make(None, WINDOW)
    beginning, other = [1] * (4 * PAGE), [9] * (2 * PAGE)
    insert(pools, cache, beginning)
    insert(pools, cache, other)
    match = insert(pools, cache, [*beginning, *[2] * (4 * PAGE)], owned_from=4 * PAGE)
    cache.match(NOBODY, np.array(other), len(other))
    cache.match(NOBODY, np.array([*beginning, *[2] * (4 * PAGE)]), match.length)
    assert cache.evict(WINDOWED, 4 * PAGE) == 4 * PAGE
    assert length(cache, beginning) == 0
    assert [length(cache, other), length(cache, [*beginning, *[2] * (4 * PAGE)])] == [2 * PAGE, 8 * PAGE]


def test_the_version_changes_when_a_window_is_lost_or_found_again() -> None:
    pools, cache = make(None, WINDOW)
    versions = [cache.version]
    insert(pools, cache, list(range(4 * PAGE)))
    versions.append(cache.version)
    cache.evict(WINDOWED, 1)
    versions.append(cache.version)
    insert(pools, cache, list(range(4 * PAGE)))
    versions.append(cache.version)
    assert versions == sorted(set(versions))


# ---- no full group ----


def nodes(cache: RadixCache) -> list[RadixNode]:
    found, stack = [], list(cache._root.children.values())
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].children.values())
    return found


def test_without_a_full_group_nodes_go_with_their_last_page() -> None:
    pools, cache = make(WINDOW)
    insert(pools, cache, list(range(4 * PAGE)))
    match = insert(pools, cache, list(range(8 * PAGE)), owned_from=4 * PAGE)
    cache.lock(match.node, pools.window_starts(match.length))
    assert cache.evict(0, 999) == 6 * PAGE
    assert len(nodes(cache)) == 2  # the first leads to the second
    cache.unlock(match.node, pools.window_starts(match.length))
    assert cache.evict(0, 999) == 2 * PAGE
    assert nodes(cache) == []
    assert pools.available == pools.total


def test_without_a_full_group_flushing_leaves_no_node() -> None:
    pools, cache = make(WINDOW)
    insert(pools, cache, list(range(4 * PAGE)), missing=PAGE)
    insert(pools, cache, list(range(8 * PAGE)), owned_from=4 * PAGE)
    cache.evict(0, 4 * PAGE)
    assert len(nodes(cache)) == 2
    assert cache.flush() == 3 * PAGE
    assert nodes(cache) == []


def test_a_prefix_of_which_nothing_is_needed_goes_when_it_is_unlocked() -> None:
    pools, cache = make(1)
    match = insert(pools, cache, list(range(4 * PAGE)), missing=4 * PAGE)
    cache.lock(match.node, pools.window_starts(match.length))
    assert len(nodes(cache)) == 1
    cache.unlock(match.node, pools.window_starts(match.length))
    assert nodes(cache) == []


def test_without_a_full_group_keys_are_bounded_by_the_slots() -> None:
    pools, cache = make(WINDOW, slots=16 * PAGE)
    most = KEYS_PER_SLOT * 16 * PAGE
    sizes = []
    for conversation in range(40):
        if not pools.available:
            cache.evict(0, PAGE)
        last = pools.alloc(1)[0]
        slots = np.concatenate([np.full(39 * PAGE, NO_SLOT, dtype=np.int32), last])
        cache.insert(NOBODY, np.full(40 * PAGE, conversation, dtype=np.int64), (slots,), 0)
        sizes.append(sum(len(node.key) for node in nodes(cache)))
    assert most - 40 * PAGE < max(sizes) <= most + 40 * PAGE


# ---- the queue ----


def test_the_dead_do_not_pile_up_in_the_queue() -> None:
    queue: EvictionQueue[Evictable] = EvictionQueue()
    alive = [Evictable(serial, serial) for serial in range(10)]
    for item in alive:
        queue.push(item)
    for serial in range(10, 1000):
        passing = Evictable(serial, serial)
        queue.push(passing)
        queue.push(passing)
        queue.discard(passing)
    assert len(queue) <= 2 * len(alive) + 2
    alive[0].last_access = 5000
    assert [queue.pop() for _ in range(11)] == [*alive[1:], alive[0], None]
