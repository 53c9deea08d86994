"""The radix cache against a model that knows no tree: a list of whole cached pages, each with the keys before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sterna.mem_cache.allocator import SlotPools
from sterna.mem_cache.prefix_cache import PrefixMatch
from sterna.mem_cache.radix_cache import RadixCache
from sterna.protocol.generate import CacheNamespace

PAGE = 4
NUM_PAGES = 24
NAMESPACES = [CacheNamespace(), CacheNamespace(salt="a"), CacheNamespace(adapter="a")]

Prefix = tuple[int, tuple[int, ...]]
"""(namespace's number, tokens up to and with a page): names one cached page."""


@dataclass
class Page:
    slots: list[int]
    last_access: int
    locks: int = 0


@dataclass
class NaiveCache:
    """Every page on its own."""

    pages: dict[Prefix, Page] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, namespace: int, tokens: list[int]) -> list[Prefix]:
        return [(namespace, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def match(self, namespace: int, tokens: list[int], limit: int) -> list[int]:
        self.clock += 1
        slots: list[int] = []
        for prefix in self.prefixes(namespace, tokens[:limit]):
            page = self.pages.get(prefix)
            if page is None:
                break
            page.last_access = self.clock
            slots += page.slots
        return slots

    def insert(self, namespace: int, tokens: list[int], slots: list[int]) -> None:
        known = len(self.match(namespace, tokens, len(tokens)))
        for prefix in self.prefixes(namespace, tokens):
            end = len(prefix[1])
            if end > known:
                self.pages[prefix] = Page(slots[end - PAGE : end], self.clock)

    def lock(self, namespace: int, tokens: list[int], by: int) -> None:
        for prefix in self.prefixes(namespace, tokens):
            self.pages[prefix].locks += by

    def has_child(self, prefix: Prefix) -> bool:
        return any(other[0] == prefix[0] and other[1][:-PAGE] == prefix[1] for other in self.pages)

    def forget(self, gone: set[int]) -> None:
        """Those slots were evicted. Only unlocked pages, from the ends inwards, and none used later than one that could have gone."""
        went = [prefix for prefix, page in self.pages.items() if set(page.slots) <= gone]
        assert sum(len(self.pages[prefix].slots) for prefix in went) == len(gone), "part of a page was evicted"
        latest = max((self.pages[prefix].last_access for prefix in went), default=0)
        for prefix in sorted(went, key=lambda each: -len(each[1])):
            assert self.pages[prefix].locks == 0, "a locked page was evicted"
            assert not self.has_child(prefix), "a page was evicted before its child"
            del self.pages[prefix]
        for prefix, page in self.pages.items():
            if page.locks == 0 and not self.has_child(prefix):
                assert page.last_access >= latest, "a page used later was evicted first"


@dataclass
class Holder:
    namespace: int
    tokens: list[int]
    match: PrefixMatch


# Few tokens, so that prefixes meet; lengths around page boundaries.
tokens_of = st.lists(st.integers(0, 1), min_size=0, max_size=5 * PAGE + 1)
namespace_of = st.integers(0, len(NAMESPACES) - 1)


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pools = SlotPools((NUM_PAGES * PAGE,), PAGE)
        self.cache = RadixCache(self.pools)
        self.naive = NaiveCache()
        self.holders: list[Holder] = []

    def key(self, tokens: list[int]) -> np.ndarray:
        return np.array(tokens, dtype=np.int64)

    def cached(self) -> set[int]:
        return set(self.cache.owned_slots()[0].tolist())

    @rule(namespace=namespace_of, tokens=tokens_of, short=st.integers(0, 3))
    def match(self, namespace: int, tokens: list[int], short: int) -> None:
        limit = max(len(tokens) - short, 0)
        peeked = self.cache.match_length(NAMESPACES[namespace], self.key(tokens), limit)
        match = self.cache.match(NAMESPACES[namespace], self.key(tokens), limit)
        expected = self.naive.match(namespace, tokens, limit)
        assert match.slots[0].tolist() == expected
        assert match.length == peeked == len(expected)

    @rule(namespace=namespace_of, tokens=tokens_of)
    def match_and_lock(self, namespace: int, tokens: list[int]) -> None:
        match = self.cache.match(NAMESPACES[namespace], self.key(tokens), len(tokens))
        self.naive.match(namespace, tokens, len(tokens))
        self.cache.lock(match.node, ())
        self.naive.lock(namespace, tokens[: match.length], 1)
        self.holders.append(Holder(namespace, tokens[: match.length], match))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), more=tokens_of)
    def extend_and_insert(self, which: int, more: list[int]) -> None:
        """As a request does: it holds a prefix, computes what follows, and hands it in."""
        holder = self.holders[which % len(self.holders)]
        tokens = holder.tokens + more
        pages = -(-len(more) // PAGE)
        if pages * PAGE > self.pools.available:
            return
        own = self.pools.alloc(pages)[0]
        slots = np.concatenate([holder.match.slots[0], own])[: len(tokens)]
        match = self.cache.insert(NAMESPACES[holder.namespace], self.key(tokens), (slots,), len(holder.tokens))
        self.naive.insert(holder.namespace, tokens[: match.length], slots.tolist())
        assert match.length == len(tokens) // PAGE * PAGE
        assert match.slots[0].tolist() == self.naive.match(holder.namespace, tokens, match.length)
        self.naive.clock -= 1  # that look-up was the test's own
        self.pools.free((own[match.length - len(holder.tokens) :],))  # the unfinished page stays the caller's

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        self.cache.unlock(holder.match.node, ())
        self.naive.lock(holder.namespace, holder.tokens, -1)

    @rule(wanted=st.sampled_from([0, 1, PAGE, PAGE + 1, 3 * PAGE, NUM_PAGES * PAGE]))
    def evict(self, wanted: int) -> None:
        before, evictable = self.cached(), self.cache.evictable_size
        freed = self.cache.evict(0, wanted)
        gone = before - self.cached()
        assert freed == len(gone)
        assert freed >= min(wanted, evictable)
        self.naive.forget(gone)

    @invariant()
    def accounting_is_exact(self) -> None:
        pages = self.naive.pages.values()
        assert self.cached() == {slot for page in pages for slot in page.slots}
        assert self.cache.protected_size == PAGE * sum(page.locks > 0 for page in pages)
        assert self.cache.evictable_size == PAGE * sum(page.locks == 0 for page in pages)
        assert self.pools.available + self.cache.protected_size + self.cache.evictable_size == self.pools.total


RadixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRadixCacheAgainstANaiveModel = RadixMachine.TestCase


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
