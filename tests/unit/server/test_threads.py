"""Slow work of one kind holds up none of another, and its queue is bounded in length and in time."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sterna.errors import QueueFull
from sterna.server.native.tokenize import serving
from sterna.server.threads import BoundedThreads
from unit.server.asgi import Call, post, start
from unit.server.engine import running

HI = [{"role": "user", "content": "hi"}]


class Held:
    """A job that runs until it is let go."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self._loop.call_soon_threadsafe(self.began.set)
        assert self._go_on.wait(30)
        return "held"

    def let_go(self) -> None:
        self._go_on.set()


@contextlib.asynccontextmanager
async def busy(*, threads: int = 1, max_waiting: int = 2, max_wait_s: float = 30.0) -> AsyncIterator[tuple[BoundedThreads, list[Any]]]:
    """Threads that are all taken, and the tasks that took them; let go at the end."""
    bounded = BoundedThreads("work", threads=threads, max_waiting=max_waiting, max_wait_s=max_wait_s)
    jobs = [Held() for _ in range(threads)]
    tasks = [asyncio.create_task(bounded.run(job)) for job in jobs]
    for job in jobs:
        await job.began.wait()
    try:
        yield bounded, [*zip(jobs, tasks, strict=True)]
    finally:
        for job in jobs:
            job.let_go()
        await asyncio.gather(*tasks, return_exceptions=True)
        bounded.shutdown()


async def test_who_finds_the_queue_full_is_told_at_once_and_who_waits_gets_a_turn_in_order() -> None:
    async with busy(threads=2) as (bounded, held):
        done: list[int] = []
        waiting = [asyncio.create_task(bounded.run(done.append, index)) for index in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await bounded.run(done.append, 9)
        held[0][0].let_go()
        await asyncio.gather(*waiting)
        assert done == [0, 1]
        await bounded.run(done.append, 2)
        assert done == [0, 1, 2]
        assert await held[0][1] == "held"


async def test_nobody_waits_for_longer_than_the_limit() -> None:
    async with busy(max_wait_s=0.01) as (bounded, held):
        ran: list[int] = []
        with pytest.raises(QueueFull):
            await bounded.run(ran.append, 1)
        held[0][0].let_go()
        await held[0][1]
        assert ran == []


async def test_who_is_cancelled_leaves_the_queue_and_a_thread_at_work_stays_taken() -> None:
    async with busy(max_waiting=1) as (bounded, held):
        ran: list[int] = []
        job, task = held[0]
        task.cancel()
        first = asyncio.create_task(bounded.run(ran.append, 1))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await bounded.run(ran.append, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(bounded.run(ran.append, 3))
        await asyncio.sleep(0)
        assert ran == []
        job.let_go()
        await second
        assert ran == [3]


async def test_a_job_s_fault_is_its_caller_s_and_frees_the_thread() -> None:
    bounded = BoundedThreads("work", threads=1, max_waiting=0, max_wait_s=30.0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await bounded.run(divmod, 1, 0)
        await asyncio.sleep(0)
    bounded.shutdown()


@contextlib.asynccontextmanager
async def tokenizing(engine: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> AsyncIterator[list[Call]]:
    """`count` calls of /tokenize, the first of which takes its time."""
    job = Held()
    inner = serving._tokenize

    def slow(*args: Any) -> Any:
        job()
        return inner(*args)

    monkeypatch.setattr(serving, "_tokenize", slow)
    calls = [start(engine.app, "POST", "/tokenize", {"prompt": "a"}) for _ in range(count)]
    await job.began.wait()
    try:
        yield calls
    finally:
        job.let_go()
        for call in calls:
            await call.done()


async def test_texts_that_are_being_tokenized_hold_up_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine, tokenizing(engine, monkeypatch, 8) as calls:
        assert (await post(engine.app, "/v1/completions", {"prompt": "a"})).status == 200
        assert (await post(engine.app, "/v1/chat/completions", {"messages": HI})).status == 200
        assert not any(call.status for call in calls)
    assert [call.status for call in calls] == [200] * 8


async def test_too_many_texts_to_tokenize_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        async with tokenizing(engine, monkeypatch, 17) as calls:
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
                refused = await post(engine.app, path, body)
                assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
            calls[-1].disconnect()
            await calls[-1].done()
            late = start(engine.app, "POST", "/tokenize", {"prompt": "b"})
        await late.done()
    assert [call.status for call in calls] == [200] * 16 + [None]
    assert late.json["tokens"] == [98]


async def test_slow_templates_hold_up_no_other_route() -> None:
    async with running() as engine:
        jobs = [Held(), Held()]
        pending = iter(jobs)
        engine.template.render = lambda *args, **kwargs: next(pending)()
        chats = [start(engine.app, "POST", "/v1/chat/completions", {"messages": HI}) for _ in jobs]
        for job in jobs:
            await job.began.wait()
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"}), ("/tokenize", {"prompt": "a"})):
            assert (await post(engine.app, path, body)).status == 200
        for job in jobs:
            job.let_go()
        assert [(await chat.done()).status for chat in chats] == [200, 200]


async def test_an_app_that_was_shut_down_runs_nothing_further() -> None:
    async with running() as engine:
        threads = engine.app.context.threads
        await threads.tokenizing.run(int)
        engine.app.shutdown()
        for bounded in (threads.tokenizing, threads.rendering):
            with pytest.raises(RuntimeError, match="shutdown"):
                await bounded.run(int)
