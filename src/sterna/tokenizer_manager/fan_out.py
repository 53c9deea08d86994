"""A fan-out: one HTTP request that runs as several (a list of prompts). Its names, its message, and its journals read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sterna.protocol.finish import ABORTED
from sterna.protocol.generate import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sterna.tokenizer_manager.admission import Admission
from sterna.tokenizer_manager.req_state import JournalReader, OutputDelta


class FanOuts:
    """Name of a live fan-out -> the rids that its members run under. Owned by the event loop."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[str, ...]] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._members

    def members(self, rid: str) -> tuple[str, ...]:
        """The rids that a client means by `rid`: those of the members, or itself where it names no fan-out."""
        return self._members.get(rid, (rid,))

    @contextmanager
    def named(self, rid: str, members: Sequence[str]) -> Iterator[None]:
        """Inside the block `rid` stands for `members`. A request that runs alone, under its own rid, needs no entry and gets none."""
        if tuple(members) == (rid,):
            yield
            return
        self._members[rid] = tuple(members)
        try:
            yield
        finally:
            del self._members[rid]


class Claims:
    """What clients call their HTTP requests, from admission on: the rid that each was given, and the X-Request-Id that it came with, which
    several may share. Owned by the event loop."""

    def __init__(self) -> None:
        self._places: dict[str, list[Sequence[Admission]]] = {}

    @contextmanager
    def claimed(self, names: set[str], places: Sequence[Admission]) -> Iterator[None]:
        """Inside the block each of `names` stands for `places`."""
        for name in names:
            self._places.setdefault(name, []).append(places)
        try:
            yield
        finally:
            for name in names:
                claims = self._places[name]
                claims[:] = [each for each in claims if each is not places]
                if not claims:
                    del self._places[name]

    def rids(self, name: str) -> list[str]:
        """The rids of those requests of that name that are registered."""
        return [place.rid for places in self._places.get(name, ()) for place in places if place.rid is not None]

    def abort_unregistered(self, name: str | None = None) -> int:
        """Those of that name, or all, that hold a place and aren't registered yet will end when they are; how many there were."""
        claims = [self._places.get(name, [])] if name is not None else self._places.values()
        places = {place for each in claims for places in each for place in places}
        early = [place for place in places if place.rid is None and place.reason is None and not place.closed]
        for place in early:
            place.end(ABORTED)
        return len(early)


def to_message(reqs: list[TokenizedGenerateReqInput]) -> TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput:
    """The one message that dispatches `reqs`, of which there is at least one."""
    return reqs[0] if len(reqs) == 1 else BatchTokenizedGenerateReqInput(reqs=reqs)


class JournalMerge:
    """Deltas of several journals in the order in which they come. Made inside a running loop; `close` ends its tasks.

    A journal isn't read on before its last delta has been dealt with: until then it merges what it gets, and its reader's counts are those
    of that delta.
    """

    def __init__(self, readers: Sequence[JournalReader]) -> None:
        self._queue: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
        self._dealt_with = [asyncio.Event() for _ in readers]
        self._last: int | None = None
        self._pumps = [asyncio.create_task(self._pump(index, reader)) for index, reader in enumerate(readers)]

    async def next(self) -> tuple[int, OutputDelta]:
        """The index of a journal, and what it gained. Loses nothing when it is cancelled and called again."""
        if self._last is not None:
            self._dealt_with[self._last].set()
            self._last = None
        index, delta = await self._queue.get()
        if isinstance(delta, Exception):
            raise delta
        self._last = index
        return index, delta

    async def _pump(self, index: int, reader: JournalReader) -> None:
        dealt_with = self._dealt_with[index]
        try:
            delta = await reader.next_delta()
            while delta.finished_reason is None:
                self._queue.put_nowait((index, delta))
                await dealt_with.wait()
                dealt_with.clear()
                delta = await reader.next_delta()
            self._queue.put_nowait((index, delta))
        except Exception as fault:
            self._queue.put_nowait((index, fault))

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
