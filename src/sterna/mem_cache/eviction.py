"""What may be evicted, the one used longest ago first."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar


class Evictable:
    """What an `EvictionQueue` holds. `last_access` may grow while it is queued: the queue notices when it comes up."""

    __slots__ = ("alive", "last_access", "queued", "serial")

    def __init__(self, serial: int, last_access: int) -> None:
        self.serial = serial
        """Unique; the lower goes first among those used at the same time."""
        self.last_access = last_access
        self.queued = False
        """Whether it has its one entry."""
        self.alive = True
        """Whether it still exists outside the queue."""


Item = TypeVar("Item", bound=Evictable)


class EvictionQueue(Generic[Item]):
    """Each item has one entry at most. Whether what comes up may indeed be evicted is for the caller to see."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._dead = 0

    def __len__(self) -> int:
        """Entries, of the living and of the dead that nobody has dropped yet."""
        return len(self._heap)

    def push(self, item: Item) -> None:
        """Nothing where it is there already."""
        if not item.queued:
            item.queued = True
            heapq.heappush(self._heap, (item.last_access, item.serial, item))

    def pop(self) -> Item | None:
        """Take out the living item that was used longest ago."""
        while self._heap:
            used, _, item = heapq.heappop(self._heap)
            item.queued = False
            if not item.alive:
                self._dead -= 1
            elif used != item.last_access:
                self.push(item)
            else:
                return item
        return None

    def discard(self, item: Item) -> None:
        """`item` no longer exists. Its entry is dropped when it comes up, or when half of all are of the dead."""
        item.alive = False
        if not item.queued:
            return
        self._dead += 1
        if 2 * self._dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].alive]
            heapq.heapify(self._heap)
            self._dead = 0
