"""The waiting queue. A step's cost doesn't depend on how many wait: anyone is taken out in O(1), and the head is found, and whoever has
a place other than the end put there, in O(log n) of those that have one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from sterna.keyed_heap import KeyedHeap
from sterna.scheduler.req import Req


class Rank(IntEnum):
    """Whom a place stands among, from the front."""

    RETRACTED = 0
    RETURNED = 1
    """Waited for a prefix."""
    ORDERED = 2


Place = tuple[Rank, float, int]
"""(among whom, where in the order, serial)."""


class WaitingQueue:
    """Those that were retracted stand before all others, in the order of arrival. Behind them, first come first served: those that waited
    for a prefix, then the rest. Or, with an `order`, all of these from its lowest to its highest value.

    `order` is asked once, when somebody comes: what it says of him must not change.
    """

    def __init__(self, order: Callable[[Req], float] | None = None) -> None:
        self._order = order
        self._reqs: OrderedDict[str, Req] = OrderedDict()
        """Those whose place is the end, in the order in which they came."""
        self._placed: KeyedHeap[Req, Place] = KeyedHeap()
        self.version = 0
        """Changes whenever who waits, or the order, changes."""

    def __len__(self) -> int:
        return len(self._reqs) + len(self._placed)

    def __iter__(self) -> Iterator[Req]:
        yield from self._placed
        yield from self._reqs.values()

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._reqs or req in self._placed

    def push_back(self, req: Req) -> None:
        """`req` has come."""
        self.version += 1
        if self._order is None:
            self._reqs[req.rid] = req
        else:
            self._place(req, Rank.ORDERED, self._order(req))

    def push_front(self, reqs: Iterable[Req]) -> None:
        """`reqs` come back."""
        for req in reqs:
            self.version += 1
            if req.retractions:
                self._place(req, Rank.RETRACTED, 0.0)
            elif self._order is None:
                self._place(req, Rank.RETURNED, 0.0)
            else:
                self._place(req, Rank.ORDERED, self._order(req))

    def _place(self, req: Req, rank: Rank, where: float) -> None:
        self._placed.put(req, (rank, where, req.serial))

    def head(self) -> Req | None:
        first = self._placed.first()
        return first[0] if first is not None else next(iter(self._reqs.values()), None)

    def discard(self, req: Req) -> None:
        """Take `req` out if it is there."""
        if self._placed.discard(req) or self._reqs.pop(req.rid, None) is not None:
            self.version += 1

    def reorder(self, reqs: list[Req]) -> None:
        """`reqs` are those that wait, in another order; the retracted stay in front. For a queue without `order`."""
        self._reqs = OrderedDict((req.rid, req) for req in reqs if not req.retractions)
        self._placed.clear()
        self.version += 1
        self.push_front(req for req in reqs if req.retractions)
