"""The contract of a prefix cache: whose KV may serve a prompt that begins with the same tokens.

A key is an int64 array, one element a position: a token id, or later the content hash of media behind a placeholder. Keys meet
only inside one `CacheNamespace`. Everything is counted in whole pages, and by KV group; of a page whose beginning alone is a key's,
that may be copied (`PartialPage`).

A slot has one owner: the free list, the cache, or one request. `insert` moves ownership from a request to the cache; `evict` moves
it from the cache to the free list. What a request reads of the cache's, it has locked: in a full group the whole prefix, in a group
with a window what is from its *window start* on (`SlotPools.window_starts`). What is before that start may go: a match of the same
prefix then ends only where every group can continue.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sterna.mem_cache.allocator import Int64Array, SlotArrays
from sterna.protocol.generate import CacheNamespace

UNKNOWN = np.iinfo(np.int64).min
"""In place of what isn't there: a page of which only the beginning is known has a key filled up with it, which no request's can equal.
It is found as a `PartialPage`."""


class PrefixNode:
    """Where a match ends; given back to `lock` and `unlock`."""

    __slots__ = ()


@dataclass(slots=True, frozen=True)
class PartialPage:
    """A page of the cache's behind a match, of which only the beginning is the key's."""

    length: int
    """Tokens, less than a page."""
    first_slots: tuple[int, ...]
    """Where the page begins, by group."""
    node: PrefixNode
    """Ends with that page. Who copies it locks this in place of the match's node, until it is copied."""


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    length: int
    """Tokens, whole pages."""
    slots: SlotArrays
    """(length,) per group; the cache's, valid until `node` is unlocked. In a group with a window, `NO_SLOT` where the cache has lost a
    page: never from the window start of `length` on."""
    node: PrefixNode
    partial: PartialPage | None = None


class PrefixCache(abc.ABC):
    shares: bool = True
    """Whether one request's KV ever serves another."""
    version: int = 0
    """Changes whenever what can be matched changes."""

    @abc.abstractmethod
    def evictable(self, group: int) -> int:
        """Tokens that `evict` can free in that group now."""

    @abc.abstractmethod
    def protected(self, group: int) -> int:
        """Tokens that locks hold in that group."""

    @property
    def evictable_size(self) -> int:
        """Of the first group."""
        return self.evictable(0)

    @property
    def protected_size(self) -> int:
        """Of the first group."""
        return self.protected(0)

    @abc.abstractmethod
    def match(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> PrefixMatch:
        """The longest cached prefix of `key` from which every group can continue, whole pages and at most `limit` tokens. Marks it as used;
        doesn't lock it."""

    @abc.abstractmethod
    def match_length(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> int:
        """`match(…).length`, without touching anything."""

    @abc.abstractmethod
    def known_length(self, namespace: CacheNamespace, key: Int64Array) -> int:
        """How much of `key` the cache has, whether or not every group could continue there: of these tokens `insert` would free the
        caller's slots, or fill gaps with them. Touches nothing."""

    @abc.abstractmethod
    def insert(self, namespace: CacheNamespace, key: Int64Array, slots: SlotArrays, owned_from: int) -> PrefixMatch:
        """Offer the KV of `key` (n,), which lies in `slots` (n,) per group; `NO_SLOT` where a group with a window has given a page back.

        The caller owns `slots[owned_from:]` and has locked what is before. Of the whole pages among them the cache takes those it
        lacks and frees those it has already; the match that it returns says up to where, and its slots are the ones to read from
        now on. The caller keeps what lies beyond `match.length`.
        """

    @abc.abstractmethod
    def lock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        """Keep everything from `node` to the root until `unlock`, in each group with a window what is from its `window_starts` on; counted.

        Raises ValueError where part of that isn't there.
        """

    @abc.abstractmethod
    def unlock(self, node: PrefixNode, window_starts: Sequence[int]) -> None:
        """Undo one `lock`; `window_starts` are those that it has by now. Raises ValueError where there was none."""

    @abc.abstractmethod
    def advance(self, node: PrefixNode, window: int, start: int, new_start: int) -> None:
        """Of a lock on `node`, move the start in the `window`-th group that has one. Raises ValueError where it doesn't hold what is
        between."""

    @abc.abstractmethod
    def evict(self, group: int, num_tokens: int) -> int:
        """Free at least `num_tokens` of that group, least recently used first, or all that isn't locked. Returns how many.

        What a full group loses, the other groups lose with it.
        """

    @abc.abstractmethod
    def owned_slots(self) -> SlotArrays:
        """Every slot of the cache's, by group; for the ownership check."""

    @abc.abstractmethod
    def flush(self) -> int:
        """Free all that isn't locked. Returns how many tokens, of the first group."""
