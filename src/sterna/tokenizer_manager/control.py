"""Questions that the server asks the scheduler, matched to their answers by number."""

from __future__ import annotations

import asyncio
import itertools

from sterna.protocol.control import FlushCacheOutput


class ControlCalls:
    """Futures by `control_id`. Owned by the event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[FlushCacheOutput]] = {}

    def open(self) -> tuple[int, asyncio.Future[FlushCacheOutput]]:
        control_id = next(self._ids)
        future: asyncio.Future[FlushCacheOutput] = asyncio.get_running_loop().create_future()
        self._pending[control_id] = future
        future.add_done_callback(lambda _: self._pending.pop(control_id, None))
        return control_id, future

    def answer(self, output: FlushCacheOutput) -> None:
        """Late answers (the caller gave up) are dropped."""
        future = self._pending.get(output.control_id)
        if future is not None and not future.done():
            future.set_result(output)

    def fail_all(self, fault: Exception) -> None:
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(fault)
