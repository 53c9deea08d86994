"""The radix cache, with and without windows, against a model that knows no tree: whole cached pages, each with the keys before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sterna.mem_cache.allocator import NO_SLOT, SlotPools
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
    slots: list[list[int]]
    """Per group; empty where it has none."""
    last_access: int
    locks: list[int]
    """Per group."""


@dataclass
class NaiveCache:
    """Every page on its own. `windows`: per group."""

    windows: tuple[int | None, ...]
    pages: dict[Prefix, Page] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, namespace: int, tokens: list[int]) -> list[Prefix]:
        return [(namespace, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def continues(self, pages: list[Page]) -> bool:
        """Whether the query after `pages` finds all that it sees."""
        query = PAGE * len(pages)
        for at, page in enumerate(pages):
            last = PAGE * at + PAGE - 1
            for group, window in enumerate(self.windows):
                if (window is None or last > query - window) and not page.slots[group]:
                    return False
        return True

    def match(self, namespace: int, tokens: list[int], limit: int) -> list[Page]:
        self.clock += 1
        pages: list[Page] = []
        for prefix in self.prefixes(namespace, tokens[:limit]):
            if prefix not in self.pages:
                break
            pages.append(self.pages[prefix])
        while not self.continues(pages):
            pages.pop()
        for page in pages:
            page.last_access = self.clock
        return pages

    def slots(self, pages: list[Page], group: int) -> list[int]:
        return [slot for page in pages for slot in page.slots[group] or [NO_SLOT] * PAGE]

    def insert(self, namespace: int, tokens: list[int], slots: list[list[int]], owned_from: int) -> list[set[int]]:
        """Returns the slots that it has no use for, per group."""
        self.clock += 1
        unused: list[set[int]] = [set() for _ in slots]
        for prefix in self.prefixes(namespace, tokens):
            end = len(prefix[1])
            page = self.pages.setdefault(prefix, Page([[] for _ in slots], self.clock, [0 for _ in slots]))
            page.last_access = self.clock
            if end <= owned_from:
                continue
            for group, own in enumerate(slots):
                offered = [slot for slot in own[end - PAGE : end] if slot != NO_SLOT]
                if page.slots[group]:
                    unused[group] |= set(offered)
                else:
                    page.slots[group] = offered
        return unused

    def lock(self, namespace: int, tokens: list[int], group: int, start: int, stop: int, by: int) -> None:
        for prefix in self.prefixes(namespace, tokens):
            if start < len(prefix[1]) <= stop:
                self.pages[prefix].locks[group] += by

    def has_child(self, prefix: Prefix) -> bool:
        return any(other[0] == prefix[0] and other[1][:-PAGE] == prefix[1] for other in self.pages)

    def forget(self, gone: list[set[int]]) -> None:
        """Those slots were evicted, per group. Whole pages, and none that are locked; in a full group from the ends inwards, and none used
        later than one that could have gone."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        for group, slots in enumerate(gone):
            went = [page for page in self.pages.values() if page.slots[group] and set(page.slots[group]) <= slots]
            assert len(slots) == PAGE * len(went), "part of a page was evicted"
            assert not any(page.locks[group] for page in went), "a locked page was evicted"
            for page in went:
                page.slots[group] = []
        if not full:
            return
        removed = [prefix for prefix, page in self.pages.items() if not page.slots[full[0]]]
        latest = max((self.pages[prefix].last_access for prefix in removed), default=0)
        for prefix in sorted(removed, key=lambda each: -len(each[1])):
            assert not self.has_child(prefix), "a page was evicted before its child"
            assert not any(self.pages[prefix].slots), "a page that left the full group stayed in another"
            del self.pages[prefix]
        for prefix, page in self.pages.items():
            if page.locks[full[0]] == 0 and not self.has_child(prefix):
                assert page.last_access >= latest, "a page used later was evicted first"


@dataclass
class Holder:
    namespace: int
    tokens: list[int]
    match: PrefixMatch
    starts: list[int]
    """Per group; 0 in a full one."""


# Few tokens, so that prefixes meet; lengths around page boundaries.
tokens_of = st.lists(st.integers(0, 1), min_size=0, max_size=5 * PAGE + 1)
namespace_of = st.integers(0, len(NAMESPACES) - 1)


class RadixMachine(RuleBasedStateMachine):
    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        # Pools of different sizes, so that each is the first to run short in some run.
        self.pools = SlotPools(tuple((NUM_PAGES - 3 * group) * PAGE for group in range(len(self.windows))), PAGE, self.windows)
        self.cache = RadixCache(self.pools)
        self.naive = NaiveCache(self.windows)
        self.holders: list[Holder] = []

    def key(self, tokens: list[int]) -> np.ndarray:
        return np.array(tokens, dtype=np.int64)

    def cached(self) -> list[set[int]]:
        return [set(slots.tolist()) for slots in self.cache.owned_slots()]

    def windowed(self, starts: list[int]) -> list[int]:
        return [start for start, window in zip(starts, self.windows, strict=True) if window is not None]

    def starts(self, length: int) -> list[int]:
        """Per group, the first page that who goes on from `length`, or from the whole page before it, needs."""
        whole = length // PAGE * PAGE
        return [0 if window is None else max(0, (whole - window + 1) // PAGE * PAGE) for window in self.windows]

    def check_slots(self, match: PrefixMatch, pages: list[Page]) -> None:
        assert match.length == PAGE * len(pages)
        for group, slots in enumerate(match.slots):
            assert slots.tolist() == self.naive.slots(pages, group)

    def check_partial(self, match: PrefixMatch, namespace: int, tokens: list[int]) -> Prefix | None:
        """The page behind the match that has most in common with what follows of `tokens`, or none."""
        stem, rest = tokens[: match.length], tokens[match.length : match.length + PAGE]
        common: dict[Prefix, int] = {}
        for prefix, page in self.naive.pages.items():
            if prefix[0] == namespace and list(prefix[1][:-PAGE]) == stem and all(page.slots):
                same = [a == b for a, b in zip(rest, prefix[1][-PAGE:], strict=False)]
                common[prefix] = same.index(False) if False in same else len(same)
        most = max(common.values(), default=0)
        if match.partial is None:
            # A match that was cut short goes no further.
            assert most == 0 or match.length < self.cache.known_length(NAMESPACES[namespace], self.key(tokens))
            return None
        found = next(prefix for prefix in common if self.first_slots(prefix) == match.partial.first_slots)
        assert match.partial.length == most == common[found]
        self.naive.pages[found].last_access = self.naive.clock
        return found

    def first_slots(self, prefix: Prefix) -> tuple[int, ...]:
        return tuple(slots[0] for slots in self.naive.pages[prefix].slots)

    def check_known(self, namespace: CacheNamespace, key: np.ndarray, prefixes: list[Prefix]) -> None:
        """Where no group is full, nodes without a page may or may not be there."""
        known = self.cache.known_length(namespace, key)
        there = [
            PAGE * (at + 1) for at, prefix in enumerate(prefixes) if prefix in self.naive.pages and any(self.naive.pages[prefix].slots)
        ]
        assert known == max(there, default=0) if None in self.windows else known >= max(there, default=0)

    def lock(self, holder: Holder, by: int) -> None:
        change = self.cache.lock if by > 0 else self.cache.unlock
        change(holder.match.node, self.windowed(holder.starts))
        for group, start in enumerate(holder.starts):
            self.naive.lock(holder.namespace, holder.tokens, group, start, len(holder.tokens), by)

    @rule(namespace=namespace_of, tokens=tokens_of, short=st.integers(0, 3))
    def match(self, namespace: int, tokens: list[int], short: int) -> None:
        limit = max(len(tokens) - short, 0)
        peeked = self.cache.match_length(NAMESPACES[namespace], self.key(tokens), limit)
        match = self.cache.match(NAMESPACES[namespace], self.key(tokens), limit)
        self.check_slots(match, self.naive.match(namespace, tokens, limit))
        assert match.length == peeked
        self.check_partial(match, namespace, tokens[:limit])

    @rule(namespace=namespace_of, tokens=tokens_of, copy=st.booleans())
    def match_and_lock(self, namespace: int, tokens: list[int], copy: bool) -> None:
        match = self.cache.match(NAMESPACES[namespace], self.key(tokens), len(tokens))
        self.naive.match(namespace, tokens, len(tokens))
        self.holders.append(Holder(namespace, tokens[: match.length], match, self.starts(match.length)))
        found = self.check_partial(match, namespace, tokens)
        if copy and found is not None and match.partial is not None:
            # Whoever copies a page holds it, and in a group with a window what one who has its beginning sees.
            pages = [range(first, first + PAGE) for first in match.partial.first_slots]
            slots = tuple(np.append(own, page).astype(np.int32) for own, page in zip(match.slots, pages, strict=True))
            whole = PrefixMatch(match.length + PAGE, slots, match.partial.node)
            self.holders[-1] = Holder(namespace, list(found[1]), whole, self.starts(match.length))
        self.lock(self.holders[-1], 1)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), more=tokens_of, follow=st.booleans())
    def extend_and_insert(self, which: int, more: list[int], follow: bool) -> None:
        """As a request does: it holds a prefix, computes what follows, gives back what falls behind its windows, and hands in the rest."""
        holder = self.holders[which % len(self.holders)]
        tokens, before = holder.tokens + more, len(holder.tokens)
        pages = -(-len(more) // PAGE)
        if pages * PAGE > self.pools.available:
            return
        own = self.pools.alloc(pages)
        starts = [max(pair) for pair in zip(holder.starts, self.starts(len(tokens)), strict=True)]
        slots = []
        for group, start in enumerate(starts):
            behind = max(start - before, 0)
            self.pools.groups[group].free(own[group][:behind])
            slots.append(np.concatenate([holder.match.slots[group], np.full(behind, NO_SLOT), own[group][behind:]])[: len(tokens)])
        available = [pool.available for pool in self.pools.groups]
        self.check_known(NAMESPACES[holder.namespace], self.key(tokens), self.naive.prefixes(holder.namespace, tokens))
        match = self.cache.insert(NAMESPACES[holder.namespace], self.key(tokens), tuple(each.astype(np.int32) for each in slots), before)
        unused = self.naive.insert(holder.namespace, tokens[: match.length], [each.tolist() for each in slots], before)
        assert match.length == len(tokens) // PAGE * PAGE
        assert [pool.available for pool in self.pools.groups] == [a + len(b) for a, b in zip(available, unused, strict=True)]
        self.check_slots(match, [self.naive.pages[prefix] for prefix in self.naive.prefixes(holder.namespace, tokens[: match.length])])
        self.pools.free(tuple(each[match.length - before :] for each in own))  # the unfinished page stays the caller's
        if follow:
            followed = Holder(holder.namespace, tokens[: match.length], match, starts)
            self.lock(followed, 1)
            self.lock(holder, -1)
            self.holders[which % len(self.holders)] = followed

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), group=st.integers(0, 2), pages=st.integers(0, 3))
    def advance(self, which: int, group: int, pages: int) -> None:
        holder = self.holders[which % len(self.holders)]
        group %= len(self.windows)
        start = min(holder.starts[group] + pages * PAGE, len(holder.tokens))
        if self.windows[group] is None or start <= holder.starts[group]:
            return
        index = [g for g, window in enumerate(self.windows) if window is not None].index(group)
        self.cache.advance(holder.match.node, index, holder.starts[group], start)
        self.naive.lock(holder.namespace, holder.tokens, group, holder.starts[group], start, -1)
        holder.starts[group] = start

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        self.lock(self.holders.pop(which % len(self.holders)), -1)

    @rule(group=st.integers(0, 2), wanted=st.sampled_from([0, 1, PAGE, PAGE + 1, 3 * PAGE, NUM_PAGES * PAGE]))
    def evict(self, group: int, wanted: int) -> None:
        group %= len(self.windows)
        before, evictable = self.cached(), self.cache.evictable(group)
        freed = self.cache.evict(group, wanted)
        gone = [old - new for old, new in zip(before, self.cached(), strict=True)]
        assert freed == len(gone[group])
        assert freed >= min(wanted, evictable)
        if self.windows[group] is not None:
            assert freed < wanted + PAGE
            assert not any(slots for other, slots in enumerate(gone) if other != group)
        self.naive.forget(gone)

    @rule()
    def flush(self) -> None:
        before = self.cached()
        flushed = self.cache.flush()
        gone = [old - new for old, new in zip(before, self.cached(), strict=True)]
        assert flushed == len(gone[0])
        self.naive.forget(gone)
        assert not any(self.cache.evictable(group) for group in range(len(self.windows)))

    @invariant()
    def accounting_is_exact(self) -> None:
        pages = self.naive.pages.values()
        for group, cached in enumerate(self.cached()):
            there = [page for page in pages if page.slots[group]]
            assert cached == {slot for page in there for slot in page.slots[group]}
            assert self.cache.protected(group) == PAGE * sum(page.locks[group] > 0 for page in there)
            assert self.cache.evictable(group) == PAGE * sum(page.locks[group] == 0 for page in there)
            pool = self.pools.groups[group]
            assert pool.available + self.cache.protected(group) + self.cache.evictable(group) == pool.total

    @invariant()
    def what_is_locked_is_there(self) -> None:
        for page in self.naive.pages.values():
            assert all(slots for slots, locks in zip(page.slots, page.locks, strict=True) if locks)


class FullAndWindow(RadixMachine):
    windows = (None, 6)


class FullAndTwoWindows(RadixMachine):
    windows = (None, 1, 10)


class OneWindow(RadixMachine):
    windows = (7,)


class TwoWindows(RadixMachine):
    windows = (3, 9)


TestFull = RadixMachine.TestCase
TestFullAndWindow = FullAndWindow.TestCase
TestFullAndTwoWindows = FullAndTwoWindows.TestCase
TestOneWindow = OneWindow.TestCase
TestTwoWindows = TwoWindows.TestCase
for case in (TestFull, TestFullAndWindow, TestFullAndTwoWindows, TestOneWindow, TestTwoWindows):
    case.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
