"""Questions that the server asks the scheduler, matched to their answers by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from sterna.errors import EngineDead
from sterna.protocol.control import FlushCacheOutput, FlushCacheReq, LiveReq, LookUpOutput, LookUpReq

LOOK_UP_TIMEOUT_S = 0.5
"""The scheduler answers between two steps; whoever looks doesn't wait for a long one."""

Answer = TypeVar("Answer", FlushCacheOutput, LookUpOutput)


class ControlCalls(Generic[Answer]):
    """Futures by `control_id`, of one kind of question. Owned by the event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}

    def open(self) -> tuple[int, asyncio.Future[Answer]]:
        control_id = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[control_id] = future
        future.add_done_callback(lambda _: self._pending.pop(control_id, None))
        return control_id, future

    def answer(self, output: Answer) -> None:
        """Late answers (the caller gave up) are dropped."""
        future = self._pending.get(output.control_id)
        if future is not None and not future.done():
            future.set_result(output)

    def fail_all(self, fault: Exception) -> None:
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(fault)


class Questions:
    """All that may be asked, of whoever is the scheduler at that moment. Owned by the event loop."""

    def __init__(self, send: Callable[[FlushCacheReq | LookUpReq], None], reply_to: str) -> None:
        self._send = send
        self._reply_to = reply_to
        self._flushes = ControlCalls[FlushCacheOutput]()
        self._look_ups = ControlCalls[LookUpOutput]()

    async def flush_cache(self) -> int:
        """Tokens whose KV was dropped. Raises EngineDead."""
        control_id, future = self._flushes.open()
        self._send(FlushCacheReq(control_id=control_id, reply_to=self._reply_to))
        return (await future).flushed_tokens

    async def look_up(self, rids: list[str]) -> dict[str, LiveReq]:
        """What the scheduler says of `rids`, by rid; nothing where it is dead or takes longer than `LOOK_UP_TIMEOUT_S`."""
        control_id, future = self._look_ups.open()
        self._send(LookUpReq(control_id=control_id, reply_to=self._reply_to, rids=rids))
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                return {live.rid: live for live in (await future).reqs}
        except (TimeoutError, EngineDead):
            return {}

    def answer(self, output: FlushCacheOutput | LookUpOutput) -> None:
        if isinstance(output, FlushCacheOutput):
            self._flushes.answer(output)
        else:
            self._look_ups.answer(output)

    def fail_all(self, message: str) -> None:
        """The scheduler that was asked has gone."""
        for calls in (self._flushes, self._look_ups):
            calls.fail_all(EngineDead(message))
