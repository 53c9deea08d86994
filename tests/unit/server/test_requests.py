"""GET /v1/requests and /v1/requests/{rid}: who asks for a request gets its stages, and nothing that was said in it."""

import asyncio
from typing import Any

import pytest

from sterna.protocol.control import LiveReq
from sterna.protocol.finish import FinishAbort, FinishMatchedStr
from sterna.protocol.generate import SchedulerMark, SchedulerTimes
from sterna.server.native.requests.protocol import QUERY_FIELDS
from unit.server.asgi import get, post, start
from unit.server.engine import Engine, answer, running, silence

CHAT = "/v1/chat/completions"
LISTED = "/v1/requests"


async def seen(engine: Engine, path: str) -> Any:
    call = await get(engine.app, path)
    assert call.status == 200, call.body
    return call.json


def stages(trace: dict[str, Any]) -> list[str]:
    return [event["stage"] for event in trace["events"]]


async def test_an_ended_request_shows_every_stage_that_it_passed() -> None:
    async with running() as engine:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        call = await post(engine.app, CHAT, body, headers={"x-request-id": "q-1"})
        rid = call.events[0]["id"]
        answered = await seen(engine, f"{LISTED}/{rid}")
        (trace,) = answered["requests"]
    assert (answered["rid"], answered["total"]) == (rid, 1)
    once = ["received", "templated", "tokenized", "dispatched", "scheduler_received", "first_scheduled", "first_token"]
    once += ["last_token", "detokenized", "first_byte", "finished"]
    assert sorted(stages(trace)) == sorted(once)
    by_stage = {event["stage"]: event for event in trace["events"]}
    assert {by_stage[stage]["process"] for stage in ("first_scheduled", "first_token", "last_token", "scheduler_received")} == {"scheduler"}
    assert by_stage["detokenized"]["process"] == "detokenizer"
    assert by_stage["received"] == {"at_ms": 0.0, "process": "server", "stage": "received"}
    times = [event["at_ms"] for event in trace["events"]]
    assert times == sorted(times)
    assert (trace["rid"], trace["group"], trace["request_id"], trace["route"], trace["stream"]) == (rid, rid, "q-1", CHAT, True)
    assert (trace["state"], trace["outcome"], trace["finish_reason"], trace["abort_cause"]) == ("finished", "ok", "length", None)
    assert (trace["cached_tokens"], trace["output_tokens"], trace["serial"], trace["replays"]) == (2, 11, 1, 0)
    assert trace["duration_ms"] == by_stage["finished"]["at_ms"]


async def test_what_happened_more_than_once_is_shown_as_often() -> None:
    marks = [("chunk", 16), ("retracted", 20), ("readmitted", 16), ("chunk", 20)]
    said = SchedulerTimes(1.0, 1.5, 2.0, 3.0, 1, 2, tuple(SchedulerMark(1.6 + i / 10, kind, n) for i, (kind, n) in enumerate(marks)))  # type: ignore[arg-type]

    async def retracted(engine: Engine, request: Any) -> None:
        await silence(engine, request)
        engine.manager._states[request.rid].times.take(said)
        engine.manager.recorder.note(request.rid, "replayed", "scheduler_died", tokens=3)
        engine.put(request.rid, "x", reason=FinishAbort("no", 503, "queue_full"))

    async with running() as engine:
        engine.script = retracted
        call = await post(engine.app, "/generate", {"text": "hi", "rid": "r"})
        assert call.status == 429
        (trace,) = (await seen(engine, f"{LISTED}/r"))["requests"]
    happened = [(event["stage"], event.get("cause"), event.get("tokens")) for event in trace["events"] if "tokens" in event]
    assert happened == [
        ("prefill_chunk", None, 16),
        ("retracted", None, 20),
        ("readmitted", None, 16),
        ("prefill_chunk", None, 20),
        ("replayed", "scheduler_died", 3),
    ]
    assert (trace["chunks"], trace["retractions"], trace["replays"], trace["outcome"], trace["code"]) == (2, 1, 1, "error", "queue_full")


async def test_a_live_request_is_looked_up_in_the_scheduler() -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", "/generate", {"text": "hello", "rid": "r"})
        while not engine.received:
            await asyncio.sleep(0)
        times = SchedulerTimes(1.0, 2.0, None, None, 0, 1, (SchedulerMark(3.0, "chunk", 4),))
        engine.live["r"] = LiveReq("r", "prefill", 5, 3, 0, times)
        (trace,) = (await seen(engine, f"{LISTED}/r"))["requests"]
        assert (trace["state"], trace["outcome"], trace["scheduler_state"]) == ("queued", None, "prefill")
        assert (trace["prompt_tokens"], trace["cached_tokens"], trace["chunks"]) == (5, 3, 1)
        assert {"first_scheduled", "prefill_chunk"} <= set(stages(trace))
        assert "finished" not in stages(trace)
        listed = await seen(engine, f"{LISTED}?state=live")
        assert [each["rid"] for each in listed["data"]] == ["r"]
        call.disconnect()
        await call.done()
        (trace,) = (await seen(engine, f"{LISTED}/r"))["requests"]
    assert (trace["state"], trace["outcome"], trace["abort_cause"]) == ("finished", "abort", "client_gone")
    assert {"reader_gone", "aborted", "finished"} <= set(stages(trace))


async def test_the_name_of_a_list_finds_its_members_and_a_members_own_finds_it() -> None:
    async with running() as engine:
        await post(engine.app, "/v1/completions", {"prompt": ["a", "b", "c"], "rid": "list"})
        await post(engine.app, "/v1/completions", {"prompt": "alone", "rid": "other"})
        group = await seen(engine, f"{LISTED}/list")
        assert [trace["rid"] for trace in group["requests"]] == ["list 0", "list 1", "list 2"]
        assert group["total"] == 3
        assert {trace["group"] for trace in group["requests"]} == {"list"}
        (member,) = (await seen(engine, f"{LISTED}/list 1"))["requests"]
        assert member["rid"] == "list 1"
        listed = await seen(engine, f"{LISTED}?rid=list&limit=2")
        assert [each["rid"] for each in listed["data"]] == ["list 2", "list 1"]


async def test_when_a_part_of_a_request_fails_its_other_parts_say_so() -> None:
    async def one_fails(engine: Engine, request: Any) -> None:
        if request.rid.endswith("1"):
            engine.put(request.rid, "", reason=FinishAbort("no", 500, "engine_failure"))

    async with running() as engine:
        engine.script = one_fails
        assert (await post(engine.app, "/v1/completions", {"prompt": ["a", "b"], "rid": "r"})).status == 500
        await asyncio.wait_for(engine.abort_seen.wait(), 5)
        while engine.manager.num_live:
            await asyncio.sleep(0)
        first, second = (await seen(engine, f"{LISTED}/r"))["requests"]
        assert (first["outcome"], first["abort_cause"]) == ("abort", "request_failed")
        assert (second["outcome"], second["code"], second["abort_cause"]) == ("error", "engine_failure", None)


async def test_the_list_pages_through_all_and_filters() -> None:
    async with running() as engine:
        for index in range(5):
            await post(engine.app, "/generate", {"text": "x", "rid": f"r{index}"}, headers={"x-request-id": f"q{index % 2}"})
        engine.script = answer("no", reason=FinishAbort("no", 500, "engine_failure"))
        await post(engine.app, "/generate", {"text": "x", "rid": "bad"})
        found: list[str] = []
        before = ""
        while True:
            page = await seen(engine, f"{LISTED}?limit=4{before}")
            found += [each["rid"] for each in page["data"]]
            if page["next_before"] is None:
                break
            before = f"&before={page['next_before']}"
        assert found == ["bad", "r4", "r3", "r2", "r1", "r0"]
        assert "events" not in page["data"][0]

        async def rids(query: str) -> list[str]:
            return [each["rid"] for each in (await seen(engine, f"{LISTED}?{query}"))["data"]]

        assert await rids("outcome=error") == ["bad"]
        assert await rids("state=finished&limit=1") == ["bad"]
        assert await rids("state=live") == []
        assert await rids("request_id=q1") == ["r3", "r1"]
        assert await rids("rid=r2") == ["r2"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("before=-1", "before"),
        ("before=99999999999999999999999", "before"),
        ("state=dead", "state"),
        ("outcome=", "outcome"),
        ("colour=red", "colour"),
        ("limit=1&limit=2", None),
        ("rid=%ff", None),
        ("&".join(f"{name}{i}=1" for i in range(9) for name in QUERY_FIELDS), None),
    ],
)
async def test_a_wrong_query_is_a_400_that_names_the_field(query: str, param: str | None) -> None:
    async with running() as engine:
        call = await get(engine.app, f"{LISTED}?{query}")
        assert (call.status, call.error["param"]) == (400, param), call.body


async def test_a_request_that_nobody_remembers_is_a_404() -> None:
    async with running(flight_recorder=1) as engine:
        for rid in ("old", "new"):
            await post(engine.app, "/generate", {"text": "x", "rid": rid})
        assert (await get(engine.app, f"{LISTED}/new")).status == 200
        for path in ("old", "", "never/was"):
            call = await get(engine.app, f"{LISTED}/{path}")
            assert (call.status, call.error["code"]) == (404, "not_found")


async def test_neither_key_nor_prompt_nor_output_nor_user_is_ever_shown() -> None:
    key, prompt, output, stop, user, salt = "sk-geheim", "promptpromptprompt", "outputoutput", "stopstring", "user@example", "saltsalt"
    auth = {"authorization": f"Bearer {key}"}
    async with running(api_key=key) as engine:
        engine.script = answer(output, stop, reason=FinishMatchedStr(stop, 5, len(output)))
        body = {"messages": [{"role": "user", "content": prompt}], "stop": [stop], "user": user, "cache_salt": salt, "rid": "r"}
        assert (await post(engine.app, CHAT, body, headers=auth)).status == 200
        refused = {"messages": [{"role": "user", "content": prompt + "RAISE"}], "rid": "s"}
        assert (await post(engine.app, CHAT, refused, headers=auth)).status == 400
        too_long = {"messages": [{"role": "user", "content": prompt * 10}], "rid": "t"}
        assert (await post(engine.app, CHAT, too_long, headers=auth)).status == 400
        engine.script = silence
        call = start(engine.app, "POST", CHAT, body | {"rid": "live"}, headers=auth)
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        shown = b""
        for path in (LISTED, f"{LISTED}/r", f"{LISTED}/t", f"{LISTED}/live", "/metrics"):
            answered = await get(engine.app, path, headers=auth)
            assert answered.status == 200, path
            shown += answered.body
        assert (await get(engine.app, LISTED)).status == 401
        records = repr(engine.manager.recorder._ended)
        call.disconnect()
        await call.done()
    for secret in (key, prompt, output, stop, user, salt):
        assert secret.encode() not in shown
        assert secret == user or secret not in records
    assert b"context_length_exceeded" in shown


async def test_refusals_errors_and_aborts_are_counted_by_their_causes() -> None:
    async with running(max_running_requests=1, max_queued_requests=0) as engine:

        async def samples() -> dict[str, float]:
            text = (await get(engine.app, "/metrics")).body.decode()
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")}

        fresh = await samples()
        assert fresh['sterna_timeouts_total{cause="waiting_timeout"}'] == fresh['sterna_replays_total{cause="scheduler_died"}'] == 0
        assert fresh['sterna_process_restarts_total{cause="signal",process="scheduler"}'] == 0
        assert (await post(engine.app, "/generate", {"text": 5})).status == 400
        assert (await post(engine.app, "/generate", {"text": "x" * 100})).status == 400
        engine.script = silence
        call = start(engine.app, "POST", "/generate", {"text": "x"})
        while not engine.received:
            await asyncio.sleep(0)
        assert (await post(engine.app, "/generate", {"text": "x"})).error["code"] == "queue_full"
        call.disconnect()
        await call.done()
        engine.manager.recorder.note("gone", "timeout", "deadline_exceeded")
        engine.manager.recorder.restarted("scheduler", "signal")
        counted = await samples()
    assert counted['sterna_refusals_total{code="queue_full"}'] == 1
    assert counted['sterna_refusals_total{code="invalid_value"}'] == 1
    assert counted['sterna_request_errors_total{code="context_length_exceeded"}'] == 1
    assert counted['sterna_aborts_total{cause="client_gone"}'] == 1
    assert counted['sterna_timeouts_total{cause="deadline_exceeded"}'] == 1
    assert counted['sterna_process_restarts_total{cause="signal",process="scheduler"}'] == 1


async def test_a_timeout_and_an_eviction_are_told_with_their_cause() -> None:
    async def ended(engine: Engine, rid: str) -> dict[str, Any]:
        while engine.manager.num_live:
            await asyncio.sleep(0)
        (trace,) = (await seen(engine, f"{LISTED}/{rid}"))["requests"]
        assert isinstance(trace, dict)
        return trace

    async with running(waiting_timeout=0.02) as engine:
        engine.script = silence
        assert (await post(engine.app, "/generate", {"text": "x", "rid": "late"})).status == 503
        trace = await ended(engine, "late")
        assert (trace["outcome"], trace["code"], trace["abort_cause"]) == ("error", "waiting_timeout", "timeout")
        assert [event["cause"] for event in trace["events"] if event["stage"] == "timeout"] == ["waiting_timeout"]
        assert engine.manager.recorder.counts["timeout", "waiting_timeout"] == 1
    async with running(schedule_policy="priority", max_running_requests=1, max_queued_requests=0) as engine:
        engine.script = silence
        low = start(engine.app, "POST", CHAT, {"messages": [{"role": "user", "content": "hi"}], "rid": "low"})
        while not engine.received:
            await asyncio.sleep(0)
        engine.script = answer("high")
        assert (await post(engine.app, "/generate", {"text": "x", "priority": 1, "rid": "high"})).status == 200
        assert (await low.done()).status == 429
        assert (await ended(engine, "low"))["abort_cause"] == "evicted"
        assert (await ended(engine, "high"))["priority"] == 1
