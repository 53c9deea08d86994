"""Who cancelled what: a silence, a client that went away, and the caller are told apart, whatever coincides."""

import asyncio
from typing import Any

import pytest

from sterna.server.exchange import BodyBudget, ClientGone, Exchange
from sterna.server.sse import COMMENT, SseStream


class Wire:
    """An exchange on no network; `gone` is the client's leaving."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        self.exchange = Exchange(scope, self._receive, self._send, max_body_bytes=10, budget=BodyBudget(10))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


async def waiting(stream_of: Wire, data: asyncio.Event) -> tuple[asyncio.Task[bool], SseStream]:
    """A task that waits for `data` through a stream that has just committed."""
    made: asyncio.Future[SseStream] = asyncio.get_running_loop().create_future()

    async def run() -> bool:
        stream = SseStream(stream_of.exchange, commit_after=3600, keep_alive=3600)
        made.set_result(stream)
        async with stream_of.exchange.until_gone():
            try:
                return await stream.wait_for(data.wait)
            finally:
                stream.close()

    task = asyncio.create_task(run())
    stream = await made
    await asyncio.sleep(0)
    return task, stream


def expire(stream: SseStream) -> None:
    stream._patience._deadline = 0.0
    stream._patience._fire()


async def test_a_silence_is_a_comment_and_the_wait_goes_on() -> None:
    wire, data = Wire(), asyncio.Event()
    task, stream = await waiting(wire, data)
    for count in (1, 2, 3):
        expire(stream)
        while len(wire.sent) < count:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    data.set()
    assert await task is True
    assert wire.sent == [COMMENT] * 3


async def test_what_is_taken_and_not_sent_does_not_end_a_silence() -> None:
    wire = Wire()
    stream = SseStream(wire.exchange, commit_after=3600, keep_alive=0.02)
    async with wire.exchange.until_gone(), asyncio.timeout(30):
        await stream.send(b"data: {}\n\n")
        while COMMENT not in wire.sent:
            await stream.wait_for(lambda: asyncio.sleep(0))
    stream.close()


async def test_data_that_comes_with_the_end_of_patience_is_not_lost() -> None:
    wire, data = Wire(), asyncio.Event()
    task, stream = await waiting(wire, data)
    data.set()
    expire(stream)
    assert await task is True


@pytest.mark.parametrize("first", ["silence", "caller"])
async def test_the_caller_s_cancellation_is_never_taken_for_a_silence(first: str) -> None:
    wire, data = Wire(), asyncio.Event()
    task, stream = await waiting(wire, data)
    if first == "caller":
        task.cancel()
    expire(stream)
    if first == "silence":
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_leaves_at_the_end_of_patience_has_left() -> None:
    wire, data = Wire(), asyncio.Event()
    task, stream = await waiting(wire, data)
    wire.gone.set()
    expire(stream)
    with pytest.raises(ClientGone):
        await task


async def test_the_caller_s_cancellation_is_never_taken_for_the_client_s_leaving() -> None:
    wire, data = Wire(), asyncio.Event()
    task, _ = await waiting(wire, data)
    wire.gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
