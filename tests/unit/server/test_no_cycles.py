"""What a request took is freed when its answer is out, not when the garbage collector comes by: until then, bodies of megabytes pile up."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

from faults.hostile import hostile_requests
from unit.server.asgi import post, start
from unit.server.engine import running, silence

HI = [{"role": "user", "content": "hi"}]
GOOD: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/generate", {"text": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
]
REFUSED: list[tuple[str, Any]] = [
    *hostile_requests("bytes"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "RAISE"}]}),
    ("/tokenize", {"model": "nobody", "prompt": "hi"}),
]


@asynccontextmanager
async def without_collector() -> AsyncIterator[list[object]]:
    """What only the collector would have freed of what the block left, when it is over."""
    garbage: list[object] = []
    gc.collect()
    gc.disable()
    try:
        yield garbage
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage += [each for each in gc.garbage if isinstance(each, msgspec.Struct | BaseException | FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("requests", [REFUSED, GOOD], ids=["refused", "answered"])
async def test_no_request_leaves_a_cycle(requests: list[tuple[str, Any]]) -> None:
    async with running() as engine:
        await post(engine.app, *requests[0])  # caches fill
        async with without_collector() as garbage:
            for path, body in requests:
                await post(engine.app, path, body)
        assert not garbage


@pytest.mark.parametrize("stream", [False, True])
async def test_nor_does_one_whose_client_goes_away(stream: bool) -> None:
    async with running() as engine:
        engine.script = silence
        async with without_collector() as garbage:
            for count, (path, body) in enumerate(GOOD[:4], start=1):
                call = start(engine.app, "POST", path, body | {"stream": stream})
                while len(engine.received) < count:
                    await asyncio.sleep(0)
                call.disconnect()
                await call.done()
                await asyncio.wait_for(engine.manager.idle_event.wait(), 30)
        assert not garbage
