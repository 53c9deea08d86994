"""A stream's status line, its errors, its silences and its clients that go away."""

import asyncio
from typing import Any

import pytest

from sterna.protocol.finish import FinishAbort, FinishLength
from unit.server.asgi import Call, post, start
from unit.server.engine import Engine, answer, running, silence

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "ho", "ha"]}),
    ("/generate", {"text": "hi"}),
    ("/generate", {"input_ids": [[1, 2], [3]]}),
]
QUEUE_FULL = FinishAbort("The request queue is full.", 429, "queue_full")
FAULT = FinishAbort("internal error", 500, "engine_failure")


async def dispatched(engine: Engine, count: int = 1) -> None:
    while len(engine.received) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_error_before_the_first_output_is_an_http_status(path: str, body: dict[str, Any], stream: bool) -> None:
    async with running() as engine:
        engine.script = answer("", reason=QUEUE_FULL)
        call = await post(engine.app, path, {**body, "stream": stream})
        assert call.status == 429
        assert call.headers["retry-after"] == "1"
        assert call.error == {"message": "The request queue is full.", "type": "overloaded_error", "param": None, "code": "queue_full"}
        await nothing_left(engine)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_error_after_the_first_output_is_one_event_and_the_end(path: str, body: dict[str, Any]) -> None:
    async with running() as engine:
        started = asyncio.Event()

        async def play(engine: Engine, request: Any) -> None:
            engine.put(request.rid, "abc")
            await started.wait()
            engine.put(request.rid, "", reason=FAULT)

        engine.script = play
        call = start(engine.app, "POST", path, {**body, "stream": True})
        await call.next_message()
        await call.next_message()
        started.set()
        await call.done()
        assert call.status == 200
        *before, error = call.events
        assert before
        assert "[DONE]" not in before
        assert error["error"] == {"message": "internal error", "type": "server_error", "param": None, "code": "engine_failure"}
        count = len(engine.received)
        prompts = sum(len(request.input_ids) for request in engine.received)
        assert error["usage"] == {
            "prompt_tokens": prompts,
            "completion_tokens": 3 * count,
            "total_tokens": prompts + 3 * count,
            "prompt_tokens_details": {"cached_tokens": 2 * count},
        }
        await nothing_left(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_client_that_goes_away_aborts_all_of_its_request(path: str, body: dict[str, Any], stream: bool) -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", path, {**body, "stream": stream})
        count = len(body.get("prompt", [""])) if isinstance(body.get("prompt"), list) else len(body.get("input_ids", [0]))
        await dispatched(engine, count)
        call.disconnect()
        await call.done()
        assert call.status is None
        assert sorted(engine.aborted) == sorted(request.rid for request in engine.received)
        await nothing_left(engine)


async def test_a_client_that_goes_away_in_mid_stream_aborts_once_and_disturbs_nobody() -> None:
    async with running() as engine:

        async def play(engine: Engine, request: Any) -> None:
            engine.put(request.rid, "abc")

        engine.script = play
        gone = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True, "rid": "gone"})
        stays = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True, "rid": "stays"})
        for call in (gone, stays):
            await call.next_message()
            await call.next_message()
        gone.disconnect()
        await gone.done()
        assert engine.aborted == ["gone"]
        engine.put("stays", "d", reason=FinishLength(4))
        await stays.done()
        assert stays.events[-1] == "[DONE]"
        await nothing_left(engine)


async def test_a_client_that_goes_away_while_its_prompt_is_rendered_starts_nothing() -> None:
    async with running() as engine:
        rendering, go_on = asyncio.Event(), asyncio.Event()

        async def render(fn: Any, *args: Any, **kwargs: Any) -> Any:
            rendering.set()
            await go_on.wait()
            return fn(*args, **kwargs)

        engine.app.context.threads.rendering.run = render  # type: ignore[method-assign]
        call = start(engine.app, "POST", CHAT, {"messages": HI})
        await rendering.wait()
        call.disconnect()
        await call.done()
        go_on.set()
        assert engine.received == []
        await nothing_left(engine)


async def test_the_status_line_waits_for_the_first_output_and_no_longer_than_the_limit() -> None:
    async with running(sse_commit_after=0.05, sse_keep_alive=0.05) as engine:
        engine.script = silence
        call = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True, "rid": "r"})
        await dispatched(engine)
        assert call.status is None
        assert (await call.next_message())["type"] == "http.response.start"
        assert (await call.next_message())["body"] == b": keep-alive\n\n"
        assert (await call.next_message())["body"] == b": keep-alive\n\n"
        engine.put("r", "late", reason=FinishLength(4))
        await call.done()
        assert call.events[1]["choices"][0]["delta"]["content"] == "late"
        assert call.events[-1] == "[DONE]"


async def test_an_error_after_the_limit_is_an_event() -> None:
    async with running(sse_commit_after=0) as engine:
        engine.script = silence
        call = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True, "rid": "r"})
        await call.next_message()
        engine.put("r", "", reason=QUEUE_FULL)
        await call.done()
        assert call.status == 200
        (event,) = call.events
        assert event["error"]["code"] == "queue_full"


async def test_a_refusal_for_load_comes_before_template_and_tokenizer() -> None:
    async with running(max_running_requests=1, max_queued_requests=1) as engine:
        engine.script = silence
        live = [start(engine.app, "POST", CHAT, {"messages": HI}) for _ in range(2)]
        await dispatched(engine, 2)
        engine.template.messages = []
        for stream in (False, True):
            call = await post(engine.app, CHAT, {"messages": [{"role": "user", "content": "RAISE"}], "stream": stream})
            assert (call.status, call.error["code"]) == (429, "queue_full")
            assert "retry-after" in call.headers
        assert engine.template.messages == []
        await drop(*live)
        await nothing_left(engine)
        engine.script = answer("ok")
        assert (await post(engine.app, CHAT, {"messages": HI})).status == 200


async def test_a_list_that_finds_no_room_gives_its_places_back() -> None:
    async with running(max_running_requests=1, max_queued_requests=1) as engine:
        engine.script = silence
        one = start(engine.app, "POST", "/v1/completions", {"prompt": "a", "rid": "one"})
        await dispatched(engine)
        call = await post(engine.app, "/v1/completions", {"prompt": ["a", "b"]})
        assert (call.status, call.error["code"]) == (429, "queue_full")
        engine.script = answer("ok")
        engine.put("one", "done", reason=FinishLength(4))
        assert (await one.done()).status == 200
        assert (await post(engine.app, "/v1/completions", {"prompt": ["a", "b"]})).status == 200


async def test_a_list_that_could_never_find_room_is_no_matter_of_load() -> None:
    async with running(max_running_requests=1, max_queued_requests=1) as engine:
        for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
            call = await post(engine.app, path, {field: ["a", "b", "c"]})
            assert (call.status, call.error["param"]) == (400, field)
        await nothing_left(engine)


async def test_one_bad_member_refuses_the_list_before_anything_is_dispatched() -> None:
    async with running() as engine:
        engine.script = silence
        call = await post(engine.app, "/v1/completions", {"prompt": [[1, 2], [3, 9999]]})
        assert (call.status, call.error["param"]) == (400, "prompt")
        assert (engine.received, engine.aborted) == ([], [])
        await nothing_left(engine)


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/generate", "text")])
async def test_a_list_is_one_message_in_the_order_of_its_prompts(path: str, field: str) -> None:
    async with running() as engine:
        assert (await post(engine.app, path, {field: ["aaa", "a", "aa"]})).status == 200
        assert engine.batches == [[request.rid for request in engine.received]]
        assert [len(request.input_ids) for request in engine.received] == [3, 1, 2]


async def test_a_dead_engine_is_told_to_every_waiter_and_to_everyone_after() -> None:
    async with running() as engine:
        engine.script = silence
        calls = [start(engine.app, "POST", path, {**body, "stream": stream}) for path, body in BODIES for stream in (False, True)]
        await dispatched(engine, 16)
        engine.manager.fail("the scheduler process died (signal 9)")
        for call in calls:
            await call.done()
            assert (call.status, call.error["code"]) == (503, "engine_dead")
            assert "signal" not in call.error["message"]
        late = await post(engine.app, CHAT, {"messages": HI})
        assert (late.status, late.error["code"]) == (503, "engine_dead")


async def test_draining_refuses_new_work_and_lets_the_old_finish() -> None:
    async with running() as engine:
        engine.script = silence
        old = start(engine.app, "POST", CHAT, {"messages": HI, "rid": "old"})
        await dispatched(engine)
        engine.manager.draining = True
        new = await post(engine.app, CHAT, {"messages": HI})
        assert (new.status, new.error["code"]) == (503, "draining")
        engine.put("old", "done", reason=FinishLength(4))
        assert (await old.done()).status == 200


async def nothing_left(engine: Engine) -> None:
    await asyncio.wait_for(engine.manager.idle_event.wait(), 30)
    assert engine.manager.accounts.live == 0


async def drop(*calls: Call) -> None:
    for call in calls:
        call.disconnect()
        await call.done()
