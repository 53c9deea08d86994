"""Sessions over HTTP. The engine is a script; its tokens are bytes."""

import asyncio
import json
import logging
from typing import Any

import pytest

from byte_model import BOS
from sterna.protocol.finish import FinishAbort, FinishLength
from unit.server.asgi import Call, get, post, start
from unit.server.engine import Engine, answer, running, silence
from unit.server.test_overload import begin, end_as_told
from unit.tokenizer_manager.fakes import pass_time

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    GENERATE: {"text": "hi"},
}
FAULT = FinishAbort("internal error", 500, "engine_failure")


async def opened(engine: Engine, **fields: Any) -> str:
    call = await post(engine.app, "/open_session", fields)
    assert call.status == 200, call.body
    assert isinstance(call.json, str)
    return call.json


async def turn(engine: Engine, path: str, session: dict[str, Any], **fields: Any) -> Call:
    return await post(engine.app, path, {**ASK[path], "session_params": session, **fields})


def seen(engine: Engine, rid: str) -> bytes:
    """The prompt that reached the engine under `rid`, last."""
    return bytes(next(request.input_ids for request in reversed(engine.received) if request.rid == rid))


async def dispatched(engine: Engine, count: int) -> None:
    while len(engine.received) < count:
        await asyncio.sleep(0)


async def test_each_surface_goes_on_from_each_other() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        engine.script = answer("AB", "C")
        for index, path in enumerate([GENERATE, COMPLETIONS, GENERATE, CHAT, CHAT, COMPLETIONS]):
            place = {"id": session} if index == 0 else {"id": session, "rid": f"r{index - 1}"}
            call = await turn(engine, path, place, rid=f"r{index}")
            assert call.status == 200, call.body
        assert seen(engine, "r1") == b"hiABChi"
        assert seen(engine, "r2") == b"hiABChiABChi"
        assert seen(engine, "r3") == b"hiABChiABChiABC" + b"[u]hi[a]"
        assert seen(engine, "r4") == b"hiABChiABChiABC" + b"[u]hi[a]ABC[u]hi[a]"
        assert seen(engine, "r5") == b"hiABChiABChiABC" + b"[u]hi[a]ABC[u]hi[a]ABChi"
        assert call.json["usage"]["prompt_tokens"] == len(seen(engine, "r5"))
        assert await gauges(engine) == (1, len(seen(engine, "r5")) + 3)


async def gauges(engine: Engine) -> tuple[float, float]:
    samples = dict(line.rsplit(" ", 1) for line in (await get(engine.app, "/metrics")).body.decode().splitlines() if line[0] != "#")
    return float(samples["sterna_sessions"]), float(samples["sterna_session_tokens"])


async def test_the_first_turn_of_a_chat_is_the_whole_conversation_so_far() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        messages = [{"role": "system", "content": "be"}, *ASK[CHAT]["messages"]]
        await turn(engine, CHAT, {"id": session}, messages=messages, rid="a")
        assert seen(engine, "a") == b"[s]be[u]hi[a]"
        await turn(engine, CHAT, {"id": session, "rid": "a"}, stream=True, rid="b")
        assert seen(engine, "b") == b"[s]be[u]hi[a]hello world[u]hi[a]"


async def test_a_chat_without_a_previous_answer_closes_an_empty_one() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        await turn(engine, CHAT, {"id": session}, rid="a")
        await turn(engine, CHAT, {"id": session, "rid": "a", "drop_previous_output": True}, rid="b")
        await turn(engine, CHAT, {"id": session, "rid": "a", "offset": -6}, rid="c")
        assert seen(engine, "b") == b"[u]hi[a][u]hi[a]"
        assert seen(engine, "c") == b"[u]hi[a]hello[u]hi[a]"


async def test_an_answer_that_was_cut_off_is_written_on_without_anything_new() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        await turn(engine, CHAT, {"id": session}, rid="a")
        assert (await turn(engine, COMPLETIONS, {"id": session, "rid": "a"}, prompt="", rid="b")).status == 200
        assert (await turn(engine, GENERATE, {"id": session, "rid": "b"}, text="", rid="c")).status == 200
        assert seen(engine, "b") == b"[u]hi[a]hello world"
        assert seen(engine, "c") == b"[u]hi[a]hello worldhello world"
        empty = await turn(engine, COMPLETIONS, {"id": session}, prompt="")
        assert (empty.status, empty.error["param"]) == (400, "prompt")


async def test_a_leading_bos_is_dropped_where_a_context_stands_before_it() -> None:
    async with running(context_len=512) as engine:
        engine.manager._leading_bos = BOS  # this model's facts name none
        session = await opened(engine)
        for place in ({"id": session}, {"id": session, "rid": "a"}):
            body = {"input_ids": [BOS, 1], "session_params": place, "rid": "b" if "rid" in place else "a"}
            assert (await post(engine.app, GENERATE, body)).status == 200
        assert engine.received[1].input_ids == [BOS, 1, *b"hello world", 1]


@pytest.mark.parametrize("path", ASK)
async def test_the_stream_is_over_when_the_turn_is(path: str) -> None:
    """Whoever has read the last event finds the turn finished."""
    async with running(context_len=512) as engine:
        session = await opened(engine)
        place = {"id": session}
        for rid in "abc":
            call = start(engine.app, "POST", path, {**ASK[path], "session_params": place, "rid": rid, "stream": True})
            while not call.body.endswith(b"[DONE]\n\n"):
                await call.next_message()
            place = {"id": session, "rid": rid}
            await call.done()
        assert seen(engine, "c").count(b"hello world") == 2


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_cut_off_by_a_disconnect_leaves_the_context_and_the_place_free(path: str, stream: bool) -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        assert (await turn(engine, path, {"id": session}, rid="a")).status == 200
        engine.script = silence
        call = start(engine.app, "POST", path, {**ASK[path], "session_params": {"id": session, "rid": "a"}, "rid": "b", "stream": stream})
        await dispatched(engine, 2)
        engine.put("b", "half")
        call.disconnect()
        await call.done()
        engine.script = answer("!")
        again = await turn(engine, path, {"id": session, "rid": "a"}, rid="c")
        assert again.status == 200, again.body
        assert seen(engine, "c") == seen(engine, "b")
        lost = await turn(engine, path, {"id": session, "rid": "b"})
        assert (lost.status, lost.error["code"], lost.error["param"]) == (404, "session_not_found", "session_params.rid")
        assert "go on from turn 'a'" in lost.error["message"]


@pytest.mark.parametrize("ending", ["abort", "fault", "refusal"])
async def test_a_turn_that_ends_otherwise_leaves_the_context_too(ending: str) -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        await turn(engine, GENERATE, {"id": session}, rid="a")
        engine.script = answer("half", "", reason=FAULT) if ending == "fault" else silence
        body = {**ASK[GENERATE], "session_params": {"id": session, "rid": "a"}, "rid": "b"}
        if ending == "refusal":
            body["sampling_params"] = {"max_new_tokens": 512}
        call = start(engine.app, "POST", GENERATE, body)
        if ending == "abort":
            await dispatched(engine, 2)
            assert (await post(engine.app, "/abort_request", {"rid": "b"})).json == {"aborted": 1}
        await call.done()
        assert call.status == {"abort": 200, "fault": 500, "refusal": 400}[ending]
        engine.script = answer("!")
        assert (await turn(engine, GENERATE, {"id": session, "rid": "a"}, rid="b")).status == 200
        assert seen(engine, "b") == b"hihello worldhi"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("limit", "status"), [("waiting_timeout", 503), ("running_timeout", 504), ("deadline_exceeded", 504)])
async def test_a_turn_that_takes_too_long_leaves_the_context(limit: str, status: int, stream: bool) -> None:
    flags = {} if limit == "deadline_exceeded" else {limit: 100.0}
    async with running(context_len=512, **flags) as engine:
        session = await opened(engine)
        await turn(engine, GENERATE, {"id": session}, rid="a")
        end_as_told(engine)
        engine.script = silence
        body = {**ASK[GENERATE], "session_params": {"id": session, "rid": "a"}, "rid": "b", "stream": stream}
        call = start(engine.app, "POST", GENERATE, {**body, "timeout": 100} if limit == "deadline_exceeded" else body)
        await dispatched(engine, 2)
        if limit == "running_timeout":
            begin(engine, "b")
            while engine.manager.accounts.queued:
                await asyncio.sleep(0)
        pass_time(engine.manager, 100)
        await call.done()
        assert (call.status, call.error["code"]) == (status, limit)
        engine.script = answer("!")
        assert (await turn(engine, GENERATE, {"id": session, "rid": "a"}, rid="b")).status == 200
        assert seen(engine, "b") == b"hihello worldhi"


async def test_a_second_turn_at_one_place_is_busy_and_so_is_an_unfinished_one() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        await turn(engine, GENERATE, {"id": session}, rid="a")
        engine.script = silence
        call = start(engine.app, "POST", GENERATE, {**ASK[GENERATE], "session_params": {"id": session, "rid": "a"}, "rid": "b"})
        await dispatched(engine, 2)
        for rid in ("a", "b"):
            for path in ASK:
                busy = await turn(engine, path, {"id": session, "rid": rid}, stream=True)
                assert (busy.status, busy.error["code"], busy.error["param"]) == (409, "session_busy", "session_params.rid")
        engine.put("b", "done", reason=FinishLength(4))
        await call.done()
        engine.script = answer("!")
        assert (await turn(engine, GENERATE, {"id": session, "rid": "a"}, rid="c")).status == 200
        assert engine.manager.accounts.live == 0


async def test_replace_ends_the_running_turn_and_goes_on_from_its_tokens() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        engine.script = silence
        call = start(engine.app, "POST", GENERATE, {**ASK[GENERATE], "session_params": {"id": session}, "rid": "a", "stream": True})
        await dispatched(engine, 1)
        engine.put("a", "some")
        await call.next_message()
        await call.next_message()
        engine.script = answer("!")
        again = await turn(engine, GENERATE, {"id": session, "rid": "a", "replace": True}, rid="b")
        assert (again.status, seen(engine, "b")) == (200, b"hisomehi")
        await call.done()
        assert call.events[-2]["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.aborted == ["a"]
        (trace,) = (await get(engine.app, "/v1/requests/a")).json["requests"]
        assert (trace["outcome"], trace["abort_cause"]) == ("abort", "replaced")


async def test_prompts_of_a_list_are_branches_under_their_own_names() -> None:
    async with running(context_len=512) as engine:
        session = await opened(engine)
        await turn(engine, COMPLETIONS, {"id": session}, rid="a")
        call = await turn(engine, COMPLETIONS, {"id": session, "rid": "a"}, prompt=["x", "y"], rid="b")
        assert call.status == 200
        both = await turn(engine, GENERATE, {"id": session, "rid": "b 1"}, text=["1", "2"], rid=["c", "d"])
        assert both.status == 200, both.body
        assert seen(engine, "b 0") == b"hihello worldx"
        assert seen(engine, "d") == b"hihello worldyhello world2"


async def test_unknown_closed_and_expired_are_404() -> None:
    async with running(context_len=512) as engine:
        clock = [0.0]
        engine.manager.sessions._now = lambda: clock[0]
        await opened(engine, session_id="closed")
        assert (await post(engine.app, "/close_session", {"session_id": "closed"})).json == {"session_id": "closed"}
        await opened(engine, session_id="idle", timeout=5)
        clock[0] = 5.0
        for name in ("never", "closed", "idle"):
            for path in ASK:
                call = await turn(engine, path, {"id": name})
                assert (call.status, call.error["code"], call.error["param"]) == (404, "session_not_found", "session_params.id")
            call = await post(engine.app, "/close_session", {"session_id": name})
            assert (call.status, call.error["code"], call.error["param"]) == (404, "session_not_found", "session_id")
        assert (engine.received, engine.manager.accounts.live) == ([], 0)


async def test_bounds_have_their_answers() -> None:
    async with running(context_len=512, max_sessions=2, max_session_tokens=40) as engine:
        session = await opened(engine, capacity_of_str_len=30)
        await opened(engine)
        full = await post(engine.app, "/open_session", {})
        assert (full.status, full.error["code"], full.headers["retry-after"]) == (429, "too_many_sessions", "1")
        assert (await turn(engine, GENERATE, {"id": session}, rid="a")).status == 200  # 13 of 30
        small = await turn(engine, GENERATE, {"id": session, "rid": "a"}, rid="b", sampling_params={"max_new_tokens": 20})
        assert (small.status, small.error["code"], small.error["param"]) == (400, "session_full", "session_params.id")
        assert (await turn(engine, GENERATE, {"id": session, "rid": "a"}, rid="b")).status == 200
        assert engine.received[-1].sampling_params.max_new_tokens == 15
        other = await opened_again(engine, session)
        assert (await turn(engine, GENERATE, {"id": other}, text="x" * 40, rid="c")).status == 200
        late = await turn(engine, GENERATE, {"id": other}, rid="d", stream=True)
        assert (late.status, late.error["code"], late.headers["retry-after"]) == (429, "too_many_session_tokens", "1")


async def opened_again(engine: Engine, session: str) -> str:
    await post(engine.app, "/close_session", {"session_id": session})
    return await opened(engine)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {"session_id": ""}, "session_id"),
        ("/open_session", {"session_id": "x" * 129}, "session_id"),
        ("/open_session", {"session_id": "twice"}, "session_id"),
        ("/open_session", {"session_id": 5}, "session_id"),
        ("/open_session", {"capacity": 0}, "capacity"),
        ("/open_session", {"capacity": 1, "capacity_of_str_len": 2}, "capacity"),
        ("/open_session", {"capacity_of_str_len": "5"}, "capacity_of_str_len"),
        ("/open_session", {"timeout": 0}, "timeout"),
        ("/open_session", {"timeout": 1e12}, "timeout"),
        ("/open_session", {"streaming": True}, "streaming"),
        ("/close_session", {}, "session_id"),
        ("/close_session", b"", None),
        (GENERATE, {"session_params": {"rid": "a"}}, "session_params.id"),
        (GENERATE, {"session_params": {"id": "twice", "offset": "5"}}, "session_params.offset"),
        (GENERATE, {"session_params": {"id": "twice", "offset": 10**12}}, "session_params.offset"),
        (GENERATE, {"session_params": {"id": "twice", "ofset": 5}}, "session_params"),
        (GENERATE, {"session_params": [{"id": "twice"}]}, "session_params"),
        (GENERATE, {"session_params": {"id": "twice", "rid": "a", "offset": 14}}, "session_params.offset"),
        (GENERATE, {"session_params": {"id": "twice"}, "rid": "a"}, "rid"),
        (CHAT, {"session_params": {"id": "twice", "rid": "a", "offset": -14}}, "session_params.offset"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_its_field(path: str, body: Any, param: str | None) -> None:
    async with running(context_len=512) as engine:
        await opened(engine, session_id="twice")
        await turn(engine, GENERATE, {"id": "twice"}, rid="a")
        call = await post(engine.app, path, {**ASK.get(path, {}), **body} if isinstance(body, dict) else body)
        assert (call.status, call.error["param"]) == (400, param), call.body
        assert engine.manager.accounts.live == 0


@pytest.mark.parametrize("body", [{}, b"", {"session_id": None, "capacity": None, "timeout": None, "streaming": None}])
async def test_everything_of_a_new_session_is_optional(body: Any) -> None:
    async with running() as engine:
        first, second = await post(engine.app, "/open_session", body), await post(engine.app, "/open_session", body)
        assert (first.status, second.status) == (200, 200)
        assert first.json != second.json


@pytest.mark.parametrize("path", ASK)
async def test_null_is_no_session(path: str) -> None:
    async with running() as engine:
        assert (await post(engine.app, path, {**ASK[path], "session_params": None})).status == 200


async def test_each_request_has_one_log_line_the_refused_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sterna.request")
    async with running(context_len=512) as engine:
        session = await opened(engine, capacity=20)
        await turn(engine, GENERATE, {"id": session}, rid="a")
        await turn(engine, GENERATE, {"id": "never"}, rid="b")
        await turn(engine, GENERATE, {"id": session}, rid="a")
        await turn(engine, GENERATE, {"id": session, "rid": "a"}, text=["x", "y"], sampling_params={"max_new_tokens": 5})
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["outcome"], line["code"]) for line in lines] == [
        ("ok", None),
        ("refused", "session_not_found"),
        ("refused", "duplicate_rid"),
        ("error", "session_full"),
        ("error", "session_full"),
    ]


async def test_sessions_need_the_key() -> None:
    async with running(api_key="right") as engine:
        for path in ("/open_session", "/close_session"):
            assert (await post(engine.app, path, {"session_id": "x"})).status == 401
        assert (await post(engine.app, "/open_session", {}, headers={"authorization": "Bearer right"})).status == 200
