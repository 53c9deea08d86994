"""The contract of a prefix cache: whose KV may serve a prompt that begins with the same tokens.

A key is an int64 array, one element a position: a token id, or later the content hash of media behind a placeholder. Keys meet
only inside one `CacheNamespace`. Everything is counted in whole pages.

A slot has one owner: the free list, the cache, or one request. `insert` moves ownership from a request to the cache; `evict` moves
it from the cache to the free list. What a request reads of the cache's, it has locked.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from sterna.mem_cache.allocator import Int64Array, SlotArrays
from sterna.protocol.generate import CacheNamespace


class PrefixNode:
    """Where a match ends; given back to `lock` and `unlock`."""

    __slots__ = ()


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    length: int
    """Tokens, whole pages."""
    slots: SlotArrays
    """(length,) per group; the cache's, valid until `node` is unlocked."""
    node: PrefixNode


class PrefixCache(abc.ABC):
    shares: bool = True
    """Whether one request's KV ever serves another."""
    version: int = 0
    """Changes whenever what can be matched changes."""

    @property
    @abc.abstractmethod
    def evictable_size(self) -> int:
        """Tokens that `evict` can free now."""

    @property
    @abc.abstractmethod
    def protected_size(self) -> int:
        """Tokens that locks hold."""

    @abc.abstractmethod
    def match(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> PrefixMatch:
        """The longest cached prefix of `key`, whole pages and at most `limit` tokens. Marks it as used; doesn't lock it."""

    @abc.abstractmethod
    def match_length(self, namespace: CacheNamespace, key: Int64Array, limit: int) -> int:
        """`match(…).length`, without touching anything."""

    @abc.abstractmethod
    def insert(self, namespace: CacheNamespace, key: Int64Array, slots: SlotArrays, owned_from: int) -> PrefixMatch:
        """Offer the KV of `key` (n,), which lies in `slots` (n,) per group.

        The caller owns `slots[owned_from:]` and has locked what is before. Of the whole pages among them the cache takes those it
        lacks and frees those it has already; the match that it returns says up to where, and its slots are the ones to read from
        now on. The caller keeps what lies beyond `match.length`.
        """

    @abc.abstractmethod
    def lock(self, node: PrefixNode) -> None:
        """Keep everything from `node` to the root until `unlock`; counted."""

    @abc.abstractmethod
    def unlock(self, node: PrefixNode) -> None: ...

    @abc.abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens`, least recently used first, or all that isn't locked. Returns how many."""

    @abc.abstractmethod
    def owned_slots(self) -> SlotArrays:
        """Every slot of the cache's; for the ownership check."""

    def flush(self) -> int:
        """Free all that isn't locked. Returns how many tokens."""
        return self.evict(self.evictable_size)
