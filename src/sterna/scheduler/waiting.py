"""The waiting queue. Every operation is O(1): a step's cost doesn't depend on how many wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sterna.scheduler.req import Req


class WaitingQueue:
    def __init__(self) -> None:
        self._reqs: OrderedDict[str, Req] = OrderedDict()
        self.version = 0
        """Changes whenever who waits, or the order, changes."""

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._reqs

    def push_back(self, req: Req) -> None:
        self._reqs[req.rid] = req
        self.version += 1

    def push_front(self, reqs: Iterable[Req]) -> None:
        """Put `reqs` before all others, those that came first in front."""
        for req in sorted(reqs, key=lambda each: each.serial, reverse=True):
            self._reqs[req.rid] = req
            self._reqs.move_to_end(req.rid, last=False)
            self.version += 1

    def head(self) -> Req | None:
        return next(iter(self._reqs.values()), None)

    def remove(self, req: Req) -> None:
        del self._reqs[req.rid]
        self.version += 1

    def reorder(self, reqs: list[Req]) -> None:
        """`reqs` are those that wait, in another order."""
        self._reqs = OrderedDict((req.rid, req) for req in reqs)
        self.version += 1
