"""Threads of the HTTP layer, one set for each kind of slow work, so that much of one kind holds up none of another.

Hop 3 tokenizes in threads of the manager's (`TokenizerManager.run_blocking`): nothing that runs here can hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from sterna.config.server_args import ServerArgs
from sterna.errors import QueueFull

P = ParamSpec("P")
R = TypeVar("R")


class BoundedThreads:
    """A few threads, and a queue before them that is bounded in length and in time. Used from one event loop."""

    def __init__(self, name: str, *, threads: int, max_waiting: int, max_wait_s: float) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)
        self._waiting = 0

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`fn` in one of the threads, first come first served.

        Raises QueueFull where `max_waiting` others wait already, and after `max_wait_s` without a free thread; what `fn` raises otherwise.
        Cancelled, it leaves the queue at once; a thread that runs `fn` already counts as taken until `fn` returns.
        """
        await self._take_thread()
        job = self._executor.submit(fn, *args, **kwargs)
        loop = asyncio.get_running_loop()

        def give_back(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(self._free.release)

        job.add_done_callback(give_back)
        try:
            return await asyncio.wrap_future(job)
        finally:
            # Its fault's traceback holds this frame: a cycle, and with it the whole request, until the collector comes by.
            del job

    async def _take_thread(self) -> None:
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise self._full()
        self._waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise self._full() from None
        finally:
            self._waiting -= 1

    def _full(self) -> QueueFull:
        return QueueFull(f"too much waits for {self._name}")

    def shutdown(self) -> None:
        """Threads end when what they run has; nothing further starts."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, frozen=True)
class Threads:
    """Made once per app, ended by `shutdown`."""

    rendering: BoundedThreads
    """Chat templates (hop 2). A render ends after `RENDER_SECONDS`; whoever has waited for a minute is told to come back."""
    tokenizing: BoundedThreads
    """/tokenize and /detokenize, which take no place among the requests. The largest body takes seconds, so few may wait."""

    @staticmethod
    def create(args: ServerArgs) -> Threads:
        requests = args.max_running_requests + args.max_queued_requests  # each waits with a place already taken
        return Threads(
            rendering=BoundedThreads("rendering", threads=2, max_waiting=requests, max_wait_s=60.0),
            tokenizing=BoundedThreads("tokenizing", threads=1, max_waiting=16, max_wait_s=5.0),
        )

    def shutdown(self) -> None:
        self.rendering.shutdown()
        self.tokenizing.shutdown()
