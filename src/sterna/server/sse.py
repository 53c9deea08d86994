"""Server-sent events, as bytes, and a stream's life: nothing sent → status line out → events → end.

The status line goes out at the first of: the first output, an error (then it is the error's own status), or `sse_commit_after`. After it an
error is one event that carries `{"error": …, "usage": …}`, and the end of the stream, without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from sterna.server.errors import HttpError
from sterna.server.exchange import Exchange
from sterna.server.openai.fields import Usage

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# A line that starts with a colon is a comment: clients skip it, and everything on the way sees that the connection lives.
COMMENT = b": keep-alive\n\n"
SOON = 0.001
"""Seconds: uvloop's clock has no less."""


def event(data: bytes) -> bytes:
    """`data` holds no line break (JSON doesn't)."""
    return b"data: " + data + b"\n\n"


class SseStream:
    """Writes one stream. `commit_after` and `keep_alive` are seconds: see `ServerArgs`."""

    __slots__ = ("_exchange", "_keep_alive", "_loop", "_patience", "_silent_until", "committed")

    def __init__(self, exchange: Exchange, *, commit_after: float, keep_alive: float) -> None:
        self._exchange = exchange
        self._keep_alive = keep_alive
        self._patience = Patience()
        self._loop = asyncio.get_running_loop()
        self._silent_until = self._loop.time() + max(0.0, exchange.received + commit_after - time.monotonic())
        """When a comment is due, if nothing is sent before."""
        self.committed = False

    async def wait_for(self, take: Callable[[], Awaitable[T]]) -> T:
        """`await take()`, with a comment line after every silence: nothing sent, whatever was taken. `take` must lose nothing when it is
        cancelled and called again."""
        patience = self._patience
        while True:
            patience.begin(self._silent_until)
            try:
                return await take()
            except asyncio.CancelledError:
                if not patience.ran_out():
                    raise
            finally:
                patience.end()
            await self.send(COMMENT)

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Bytes of any number of whole events; with `more` False the stream ends after them."""
        if not self.committed:
            self.committed = True
            await self._exchange.start(
                200,
                [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ],
            )
        await self._exchange.write(data, more=more)
        self._silent_until = self._loop.time() + self._keep_alive

    async def fail(self, error: HttpError, usage: Usage, held: bytes = b"") -> None:
        """End the stream with `error`; where output may have left before it, the event says what was used, after what was `held` back."""
        if self.committed:
            await self.send(held + event(b'%b,"usage":%b}' % (error.body.removesuffix(b"}"), msgspec.json.encode(usage))), more=False)
        else:
            await self._exchange.respond_error(error)

    def close(self) -> None:
        self._patience.close()


class Patience:
    """Cancels what the current task waits for, between `begin` and `end`, once it has lasted too long.

    `asyncio.timeout` arms and disarms a timer at every wait. Here one timer stays armed and is moved on only when it fires, so that a wait
    that ends in time, as nearly all do, costs next to nothing.
    """

    __slots__ = ("_cancelling", "_deadline", "_expired", "_loop", "_task", "_timer", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._waiting = False
        self._cancelling = 0
        """Cancellations that others had asked for before the wait began."""
        self._deadline = 0.0
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, deadline: float) -> None:
        """A wait until `deadline`, in the loop's time, begins."""
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            self._arm(deadline)
        self._cancelling = self._task.cancelling()
        self._waiting = True

    def ran_out(self) -> bool:
        """Whether the CancelledError that ended the wait is the timer's, and nobody else's too."""
        return self._expired and self._task.uncancel() <= self._cancelling

    def end(self) -> None:
        self._waiting = self._expired = False

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # What is due now isn't a timer to uvloop, and has no `when`.
        self._timer = self._loop.call_at(max(when, self._loop.time() + SOON), self._fire)

    def _fire(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        if self._loop.time() < self._deadline:
            self._arm(self._deadline)
        else:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
