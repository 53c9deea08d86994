"""Limits, deadlines, priorities and aborts as a client sees them: a status before the first byte, an event after it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from sterna.protocol.control import SchedulingStarted
from sterna.protocol.generate import AbortReq
from unit.server.asgi import Call, post, start
from unit.server.engine import Engine, answer, running, silence
from unit.server.test_stream_life import BODIES, CHAT, HI, dispatched, nothing_left
from unit.tokenizer_manager.fakes import pass_time

SOON = 0.02
COMPLETIONS = "/v1/completions"


async def drop(*calls: Call) -> None:
    for call in calls:
        call.disconnect()
    for call in calls:
        await call.done()


def begin(engine: Engine, *rids: str) -> None:
    engine.inbox.put(SchedulingStarted(epoch=1, rids=list(rids), time=0.0))


def end_as_told(engine: Engine) -> None:
    """The scheduler ends whoever it is told to end, for the reason that it is told."""
    send = engine.send

    def obey(message: Any) -> None:
        if isinstance(message, AbortReq):
            engine.aborted.append(message.rid)
            engine.put(message.rid, "", reason=message.reason, ids=0)
        else:
            send(message)

    engine.manager.recovery.scheduler.send = obey  # type: ignore[method-assign]


# ---- deadlines ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_timeout_before_the_first_byte_is_an_http_status(path: str, body: dict[str, Any], stream: bool) -> None:
    async with running() as engine:
        engine.script = silence
        end_as_told(engine)
        call = await post(engine.app, path, {**body, "stream": stream, "timeout": SOON})
        assert (call.status, call.error["type"], call.error["code"]) == (504, "timeout_error", "deadline_exceeded")
        assert sorted(engine.aborted) == sorted(request.rid for request in engine.received)
        await nothing_left(engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_timeout_has_its_own_status_and_code(stream: bool) -> None:
    for flag, expected in (("waiting_timeout", (503, "waiting_timeout")), ("running_timeout", (504, "running_timeout"))):
        async with running(**{flag: SOON}) as engine:

            async def play(engine: Engine, request: Any, flag: str = flag) -> None:
                if flag == "running_timeout":
                    begin(engine, request.rid)

            engine.script = play
            end_as_told(engine)
            call = await post(engine.app, CHAT, {"messages": HI, "stream": stream})
            assert (call.status, call.error["code"]) == expected
            assert ("retry-after" in call.headers) == (expected[0] == 503)
            await nothing_left(engine)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_timeout_in_mid_stream_is_an_event_with_what_was_used_after_all_text_that_came(path: str, body: dict[str, Any]) -> None:
    async with running() as engine:
        end_as_told(engine)

        async def play(engine: Engine, request: Any) -> None:
            engine.put(request.rid, "abc")

        engine.script = play
        call = start(engine.app, "POST", path, {**body, "stream": True, "timeout": 3600})
        while not engine.received or call.body.count(b"abc") < len(engine.received):
            await call.next_message()
        pass_time(engine.manager, 3600)
        await call.done()
        assert call.status == 200
        *before, error = call.events
        assert b"abc" in call.body
        assert "[DONE]" not in before
        assert error["error"]["code"] == "deadline_exceeded"
        count = len(engine.received)
        prompt_tokens = sum(len(request.input_ids) for request in engine.received)
        assert (error["usage"]["prompt_tokens"], error["usage"]["completion_tokens"]) == (prompt_tokens, 3 * count)
        await nothing_left(engine)


async def test_text_that_comes_with_the_end_is_sent_before_the_error() -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", COMPLETIONS, {"prompt": "hi", "stream": True, "rid": "r", "timeout": 3600})
        await dispatched(engine)
        begin(engine, "r")
        while engine.manager.accounts.queued:
            await asyncio.sleep(0)

        def last_words(message: Any) -> None:
            if isinstance(message, AbortReq):
                engine.put("r", "abc")
                engine.put("r", "def", reason=message.reason)

        engine.manager.recovery.scheduler.send = last_words  # type: ignore[method-assign]
        pass_time(engine.manager, 3600)
        await call.done()
        *before, error = call.events
        assert "".join(event["choices"][0]["text"] for event in before) == "abcdef"
        assert error["error"]["code"] == "deadline_exceeded"
        assert error["usage"]["completion_tokens"] == 6
        await nothing_left(engine)


async def test_a_deadline_is_kept_while_the_template_renders() -> None:
    async with running() as engine:
        rendering = asyncio.Event()

        async def render(*args: Any) -> Any:
            rendering.set()
            await asyncio.Event().wait()

        engine.app.context.threads.rendering.run = render  # type: ignore[method-assign]
        call = start(engine.app, "POST", CHAT, {"messages": HI, "timeout": 3600})
        await rendering.wait()
        pass_time(engine.manager, 3600)
        await call.done()
        assert (call.status, call.error["code"]) == (504, "deadline_exceeded")
        await nothing_left(engine)


async def test_field_and_header_both_limit_and_the_shorter_one_holds() -> None:
    async with running() as engine:
        engine.script = silence
        end_as_told(engine)
        for timeout, header in ((3600, str(SOON)), (SOON, "3600"), (None, str(SOON))):
            call = await post(engine.app, CHAT, {"messages": HI, "timeout": timeout}, headers={"X-Request-Timeout": header})
            assert (call.status, call.error["code"]) == (504, "deadline_exceeded")
        await nothing_left(engine)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
async def test_what_is_no_timeout_or_priority_is_refused_by_name(path: str) -> None:
    body = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hi"}, "/generate": {"text": "hi"}}[path]
    async with running(schedule_policy="priority") as engine:
        for field, value in [
            *(("timeout", value) for value in (0, -1, "5", 1e12, [1])),
            *(("priority", value) for value in (101, -101, "1", 1.5, 10**30)),
        ]:
            call = await post(engine.app, path, {**body, field: value})
            assert (call.status, call.error["param"]) == (400, field), value
        for header in ("soon", "", "0", "-1", "nan", "inf", "1e12", "1_0"):
            call = await post(engine.app, path, body, headers={"X-Request-Timeout": header})
            assert (call.status, call.error["param"]) == (400, "X-Request-Timeout"), header
        call = await post(engine.app, path, {**body, "timeout": None, "priority": None})
        assert call.status == 200
        assert len(engine.received) == 1


async def test_a_priority_reaches_the_scheduler_and_is_refused_where_nothing_goes_by_it() -> None:
    for path, body in BODIES:
        async with running(schedule_policy="priority") as engine:
            assert (await post(engine.app, path, {**body, "priority": -7})).status == 200
            assert {request.priority for request in engine.received} == {-7}
        async with running() as engine:
            call = await post(engine.app, path, {**body, "priority": -7})
            assert (call.status, call.error["param"], call.error["code"]) == (400, "priority", "unsupported_parameter")
            assert (await post(engine.app, path, {**body, "priority": 0})).status == 200


# ---- refusals ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_waiting_tokens_are_estimated_from_the_body_before_anything_is_done(path: str, body: dict[str, Any], stream: bool) -> None:
    async with running(max_queued_tokens=30, context_len=2000) as engine:
        engine.script = silence
        waits = start(engine.app, "POST", COMPLETIONS, {"prompt": "x" * 30, "rid": "waits"})
        await dispatched(engine)
        engine.template.messages = []
        call = await post(engine.app, path, {**body, "stream": stream})
        assert (call.status, call.error["code"]) == (429, "too_many_queued_tokens")
        assert int(call.headers["retry-after"]) >= 1
        assert engine.template.messages == []
        begin(engine, "waits")
        engine.script = answer("ok")
        while engine.manager.accounts.queued_tokens:
            await asyncio.sleep(0)
        assert (await post(engine.app, path, {**body, "stream": stream})).status == 200
        await drop(waits)
        await nothing_left(engine)


async def test_one_key_s_requests_are_bounded_and_no_key_is_kept_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(max_concurrent_per_key=2) as engine:
        engine.script = silence

        def call(key: str | None, **body: Any) -> Call:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return start(engine.app, "POST", CHAT, {"messages": HI, **body}, headers=headers)

        live = [call(key) for key in ("key-of-ada", "key-of-ada", None, None, "key-of-bob")]
        await dispatched(engine, 5)
        for key in ("key-of-ada", None):
            for stream in (False, True):
                refused = await call(key, stream=stream).done()
                assert (refused.status, refused.error["code"]) == (429, "too_many_concurrent")
                assert "retry-after" in refused.headers
                assert b"key-of" not in refused.body
        live.append(call("key-of-bob"))
        await dispatched(engine, 6)
        assert sorted(engine.manager.accounts._per_key.values()) == [2, 2, 2]
        assert not any(b"key-of" in key for key in engine.manager.accounts._per_key)
        await drop(*live)
        await nothing_left(engine)
        assert engine.manager.accounts._per_key == {}
    assert "key-of" not in caplog.text


@pytest.mark.parametrize("stage", ["rendering", "dispatched"])
async def test_an_evicted_request_is_answered_429_wherever_it_is(stage: str) -> None:
    async with running(schedule_policy="priority", max_running_requests=1, max_queued_requests=0) as engine:
        engine.script = silence
        reached = asyncio.Event()
        run = engine.app.context.threads.rendering.run

        async def render(*args: Any) -> Any:
            reached.set()
            return await asyncio.Event().wait()

        if stage == "rendering":
            engine.app.context.threads.rendering.run = render  # type: ignore[method-assign]
        low = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True})
        await (reached.wait() if stage == "rendering" else dispatched(engine))
        engine.app.context.threads.rendering.run = run  # type: ignore[method-assign]
        engine.script = answer("high")
        high = await post(engine.app, CHAT, {"messages": HI, "priority": 1})
        assert high.status == 200
        await low.done()
        assert (low.status, low.error["code"]) == (429, "queue_full")
        assert int(low.headers["retry-after"]) >= 1
        await nothing_left(engine)


# ---- aborts by name ----


async def abort(engine: Engine, **body: Any) -> int:
    call = await post(engine.app, "/abort_request", body)
    assert call.status == 200
    return int(call.json["aborted"])


async def test_a_request_id_stands_for_all_that_was_sent_with_it_and_a_rid_for_itself() -> None:
    async with running() as engine:
        engine.script = silence
        calls = [
            start(engine.app, "POST", COMPLETIONS, {"prompt": prompt, "rid": rid}, headers={"X-Request-Id": name})
            for prompt, rid, name in ((["a", "b"], "x", "mine"), ("c", "y", "mine"), ("d", "z", "other"), ("e", "mine-too", "mine-too"))
        ]
        await dispatched(engine, 5)
        assert await abort(engine, rid="min") == 0
        assert await abort(engine, rid="mine") == 3
        assert sorted(engine.aborted) == ["x 0", "x 1", "y"]
        for call in calls[:2]:
            await call.done()
            assert {choice["finish_reason"] for choice in call.json["choices"]} == {"abort"}
        assert await abort(engine, rid="mine") == 0
        assert await abort(engine, rid="mine-too") == 1
        assert await abort(engine, abort_all=True) == 1
        assert sorted(engine.aborted) == ["mine-too", "x 0", "x 1", "y", "z"]
        for call in calls[2:]:
            await call.done()
        await nothing_left(engine)
        assert engine.manager.claims._places == {}


@pytest.mark.parametrize("name", [{"rid": "r"}, {"rid": "id"}, {"abort_all": True}])
async def test_an_abort_before_a_request_is_registered_reaches_it(name: dict[str, Any]) -> None:
    async with running() as engine:
        rendering, go_on = asyncio.Event(), asyncio.Event()

        async def render(fn: Callable[..., Any], *args: Any) -> Any:
            rendering.set()
            await go_on.wait()
            return fn(*args)

        engine.app.context.threads.rendering.run = render  # type: ignore[method-assign]
        call = start(engine.app, "POST", CHAT, {"messages": HI, "rid": "r"}, headers={"X-Request-Id": "id"})
        await rendering.wait()
        assert await abort(engine, **name) == 1
        assert await abort(engine, **name) == 0
        go_on.set()
        await call.done()
        assert call.json["choices"][0]["finish_reason"] == "abort"
        assert (engine.received, engine.aborted) == ([], [])
        await nothing_left(engine)


async def test_a_key_for_what_concerns_everybody() -> None:
    async with running(api_key="key", admin_api_key="admin") as engine:

        async def status(path: str, key: str | None, body: Any = None, method: str = "POST") -> int | None:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return (await start(engine.app, method, path, body, headers=headers).done()).status

        for path, body in (("/flush_cache", None), ("/abort_request", {"abort_all": True})):
            assert [await status(path, key, body) for key in (None, "key", "wrong", "admin")] == [401, 401, 401, 200]
        assert [await status("/v1/requests", key, method="GET") for key in ("key", "admin")] == [401, 200]
        assert [await status("/abort_request", key, {"rid": "r"}) for key in (None, "key", "admin")] == [401, 200, 200]
        assert [await status("/server_info", key, method="GET") for key in (None, "key", "admin")] == [401, 200, 200]
        info = await start(engine.app, "GET", "/server_info", headers={"Authorization": "Bearer key"}).done()
        assert not {"api_key", "admin_api_key"} & info.json["server_args"].keys()
    async with running(admin_api_key="admin") as engine:
        assert (await post(engine.app, COMPLETIONS, {"prompt": "hi"})).status == 200
        assert (await post(engine.app, "/flush_cache")).status == 401
    async with running(api_key="key") as engine:
        assert (await post(engine.app, "/flush_cache", headers={"Authorization": "Bearer key"})).status == 200
