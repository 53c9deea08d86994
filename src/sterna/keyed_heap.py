"""A priority queue whose members leave from the middle and change their place."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

SLACK = 64
"""Outdated entries that may be kept beside as many as there are valid ones."""


class Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


Key = TypeVar("Key", bound=Hashable)
Place = TypeVar("Place", bound=Ordered)


class KeyedHeap(Generic[Key, Place]):
    """Each key has one place; the lowest place is first, and of equal ones the one that was put earlier.

    `put`, `discard` and `first` take O(log n), amortized: who leaves from the middle leaves an entry behind, which is dropped when it comes
    up, or when there are more outdated entries than valid ones. Memory is O(n) whoever comes and goes.
    """

    def __init__(self) -> None:
        self._valid: dict[Key, tuple[Place, int, Key]] = {}
        self._heap: list[tuple[Place, int, Key]] = []
        """The values of `_valid`, and outdated ones."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, key: Key) -> bool:
        return key in self._valid

    def __iter__(self) -> Iterator[Key]:
        """The keys, in order. O(n log n)."""
        return iter([key for _, _, key in sorted(self._valid.values())])

    def put(self, key: Key, place: Place) -> None:
        """`key` comes, or leaves its place for another."""
        self._compact()
        self._count += 1
        entry = (place, self._count, key)
        self._valid[key] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, key: Key) -> bool:
        """Take `key` out. False where it isn't in."""
        found = self._valid.pop(key, None) is not None
        self._compact()
        return found

    def first(self) -> tuple[Key, Place] | None:
        while self._heap:
            place, _, key = self._heap[0]
            if self._valid.get(key) is self._heap[0]:
                return key, place
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) >= 2 * len(self._valid) + SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)

    def clear(self) -> None:
        self._valid.clear()
        self._heap.clear()
