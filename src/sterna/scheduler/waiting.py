"""The waiting queue. A step's cost doesn't depend on how many wait: the head is found, and anyone taken out, in O(1), and whoever comes
back is put in his place in O(log n) of those that have."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sterna.scheduler.req import Req

Place = tuple[bool, int, int, Req]
"""(not retracted, serial, a count that makes it unique, who): the order of those that came back."""


class WaitingQueue:
    """Those that came back to it stand before all others: first the retracted, then those that waited for a prefix, each in the order of
    arrival."""

    def __init__(self) -> None:
        self._reqs: OrderedDict[str, Req] = OrderedDict()
        self._back: dict[str, Place] = {}
        self._heap: list[Place] = []
        """The places of `_back`, and outdated ones that are dropped when they come up."""
        self.version = 0
        """Changes whenever who waits, or the order, changes."""

    def __len__(self) -> int:
        return len(self._reqs) + len(self._back)

    def __iter__(self) -> Iterator[Req]:
        yield from (place[3] for place in sorted(self._back.values()))
        yield from self._reqs.values()

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._reqs or req.rid in self._back

    def push_back(self, req: Req) -> None:
        self._reqs[req.rid] = req
        self.version += 1

    def push_front(self, reqs: Iterable[Req]) -> None:
        """`reqs` come back."""
        for req in reqs:
            self.version += 1
            place = (not req.retractions, req.serial, self.version, req)
            self._back[req.rid] = place
            heapq.heappush(self._heap, place)

    def head(self) -> Req | None:
        while self._heap:
            req = self._heap[0][3]
            if self._back.get(req.rid) is self._heap[0]:
                return req
            heapq.heappop(self._heap)
        return next(iter(self._reqs.values()), None)

    def discard(self, req: Req) -> None:
        """Take `req` out if it is there."""
        if self._back.pop(req.rid, None) is not None or self._reqs.pop(req.rid, None) is not None:
            self.version += 1

    def reorder(self, reqs: list[Req]) -> None:
        """`reqs` are those that wait, in another order; the retracted stay in front."""
        self._reqs = OrderedDict((req.rid, req) for req in reqs if not req.retractions)
        self._back.clear()
        self._heap.clear()
        self.version += 1
        self.push_front(req for req in reqs if req.retractions)
