"""What holds on every route: keys, ids, unknown paths; and the routes that don't generate."""

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sterna.protocol.control import SchedulerStats
from sterna.protocol.finish import FinishAbort, FinishLength
from sterna.server.app import App
from sterna.server.health import SILENCE_S
from sterna.server.request_log import RequestLog
from sterna.server.route import compile_path
from sterna.server.routes import ROUTES
from sterna.tokenizer_manager import manager
from sterna.tokenizer_manager.req_state import ReqState, RequestTimes
from unit.server.asgi import get, post, start
from unit.server.engine import answer, running, silence
from unit.tokenizer_manager.fakes import a_place

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
KEY = "sk-gehéim"
PATHS = [(route.method, route.path.replace("{model:path}", "bytes").replace("{asset}", "swagger-ui.css")) for route in ROUTES]


@pytest.mark.parametrize("method_path", [*PATHS, ("GET", "/nowhere"), ("GET", "/health/"), ("PUT", "/v1/models")], ids=str)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
    ],
    ids=["none", "empty", "bare", "wrong", "basic", "schemeless"],
)
async def test_every_route_but_health_needs_the_key(method_path: tuple[str, str], headers: dict[str, str]) -> None:
    method, path = method_path
    async with running(api_key=KEY) as engine:
        call = await start(engine.app, method, path, headers=headers).done()
    if path in ("/health", "/ready"):
        assert call.status == 200
    else:
        assert (call.status, call.error["code"]) == (401, "invalid_api_key")
        assert call.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in call.headers


async def test_the_right_key_opens_and_is_never_told() -> None:
    async with running(api_key=KEY) as engine:
        for scheme in ("Bearer", "bearer"):
            call = await get(engine.app, "/server_info", headers={"authorization": f"{scheme} {KEY}"})
            assert call.status == 200
        assert "api_key" not in call.json["server_args"]
        assert "geh" not in call.body.decode()


async def test_no_key_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(api_key=KEY) as engine:
        for key in (KEY, "sk-wrong"):
            await post(engine.app, CHAT, {"messages": HI}, headers={"authorization": f"Bearer {key}"})
    assert "geh" not in caplog.text
    assert "sk-" not in caplog.text


async def test_open_metrics_frees_metrics_alone() -> None:
    async with running(api_key=KEY, open_metrics=True) as engine:
        assert (await get(engine.app, "/metrics")).status == 200
        assert (await get(engine.app, "/server_info")).status == 401


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("two words", False), ("a\x01b", False), ("", False), ("é", False)],
)
async def test_a_fit_request_id_is_echoed_and_another_is_replaced(given: str, echoed: bool) -> None:
    async with running() as engine:
        for call in (
            await post(engine.app, CHAT, {"messages": HI}, headers={"x-request-id": given}),
            await post(engine.app, CHAT, {"messages": HI, "stream": True}, headers={"x-request-id": given}),
            await post(engine.app, CHAT, {}, headers={"x-request-id": given}),
            await get(engine.app, "/nowhere", headers={"x-request-id": given}),
        ):
            told = call.headers["x-request-id"]
            assert (told == given) == echoed
            assert told.isprintable()
            assert 0 < len(told) <= 128


async def test_a_request_id_may_repeat_while_it_lives() -> None:
    async with running() as engine:
        engine.script = silence
        headers = {"x-request-id": "same"}
        calls = [start(engine.app, "POST", CHAT, {"messages": HI}, headers=headers) for _ in range(2)]
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        for call in calls:
            call.disconnect()
            await call.done()


async def test_unknown_paths_and_methods_are_told_in_openai_s_shape() -> None:
    async with running() as engine:
        nowhere = await get(engine.app, "/v2/nothing")
        wrong = await get(engine.app, CHAT)
        head = await start(engine.app, "HEAD", "/health").done()
    assert (nowhere.status, nowhere.error["code"]) == (404, "not_found")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert head.status == 200


@pytest.mark.parametrize(
    ("path", "asked", "params"),
    [
        ("/v1/models/{model:path}", "/v1/models/a/b.c", {"model": "a/b.c"}),
        ("/v1/models/{model:path}", "/v1/models/", {"model": ""}),
        ("/v1/models/{model:path}", "/v1/models", None),
        ("/docs/{asset}", "/docs/swagger-ui.css", {"asset": "swagger-ui.css"}),
        ("/docs/{asset}", "/docs/a/b", None),
        ("/docs/{asset}", "/docs/", None),
        ("/docs/{asset}", "/docs/a\n/", None),
        ("/a.b/{x}/c/{y}", "/a.b/1/c/2", {"x": "1", "y": "2"}),
        ("/a.b/{x}/c/{y}", "/a-b/1/c/2", None),
        ("/a.b/{x}", "/0/a.b/1", None),
    ],
)
def test_a_path_s_parameters_are_one_segment_or_the_rest(path: str, asked: str, params: dict[str, str] | None) -> None:
    match = compile_path(path).fullmatch(asked)
    assert (match and match.groupdict()) == params


async def test_an_unexpected_fault_is_a_500_without_its_cause_and_a_log_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as engine:

        def render(messages: Any, **kwargs: Any) -> str:
            raise ZeroDivisionError("secret detail")

        engine.template.render = render
        call = await post(engine.app, CHAT, {"messages": HI})
        assert engine.manager.accounts.live == 0
    assert call.status == 500
    assert call.error == {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    assert "secret detail" in caplog.text


async def test_health_is_liveness_and_ready_is_readiness() -> None:
    async with running(ready=False) as engine:
        assert (await get(engine.app, "/health")).status == 200
        starting = await get(engine.app, "/ready")
        assert (starting.status, starting.json) == (503, {"status": "starting"})
        refused = await post(engine.app, CHAT, {"messages": HI})
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
    async with running() as engine:
        assert (await get(engine.app, "/ready")).status == 200
        engine.manager.draining = True
        assert (await get(engine.app, "/health")).status == 200
        assert (await get(engine.app, "/ready")).json == {"status": "draining"}
        engine.manager.fail("gone")
        dead = await get(engine.app, "/health")
        assert (dead.status, dead.json) == (503, {"status": "dead"})


async def test_health_is_progress_of_the_work_that_there_is() -> None:
    long_ago = time.monotonic() - SILENCE_S - 1
    async with running() as engine:
        engine.script = silence

        async def status() -> tuple[int, str]:
            call = await get(engine.app, "/health")
            return call.status, call.json["status"]

        engine.manager.last_heard = long_ago
        assert await status() == (200, "ok")  # idle, and so silent
        call = start(engine.app, "POST", CHAT, {"messages": HI, "stream": True, "rid": "r"})
        while not engine.received:
            await asyncio.sleep(0)
        assert await status() == (200, "ok")  # silent for long, but with work for a moment only
        times = engine.manager._states["r"].times
        times.dispatched = long_ago
        assert await status() == (503, "stalled")
        engine.put("r", "a")
        await call.next_message()
        assert await status() == (200, "ok")  # its work is old, but goes on
        engine.manager.last_heard = long_ago
        assert await status() == (503, "stalled")
        engine.put("r", "b", reason=FinishLength(2))
        await call.done()
        engine.manager.last_heard = long_ago
        assert await status() == (200, "ok")  # idle again


TOKENIZING: list[tuple[str, str, Any]] = [("/tokenize", "prompt", "a"), ("/detokenize", "tokens", [97])]


async def test_tokenize_and_detokenize_are_each_other_s_inverse() -> None:
    async with running() as engine:
        one = (await post(engine.app, "/tokenize", {"prompt": "héllo", "return_token_strs": True})).json
        many = (await post(engine.app, "/tokenize", {"prompt": ["a", "bc"]})).json
        back = (await post(engine.app, "/detokenize", {"tokens": one["tokens"]})).json
        backs = (await post(engine.app, "/detokenize", {"tokens": many["tokens"]})).json
        bad = await post(engine.app, "/detokenize", {"tokens": [260]})
        mixed = await post(engine.app, "/detokenize", {"tokens": [1, [2]]})
        empty = await post(engine.app, "/detokenize", {"tokens": []})
        others = [await post(engine.app, path, {field: value, "model": "other"}) for path, field, value in TOKENIZING]
    assert one["tokens"] == list("héllo".encode())
    assert (one["count"], one["max_model_len"]) == (6, 64)
    assert one["token_strs"][0] == "h"
    assert (many["tokens"], many["count"]) == ([[97], [98, 99]], [1, 2])
    assert back == {"text": "héllo"}
    assert backs == {"text": ["a", "bc"]}
    assert bad.error["param"] == mixed.error["param"] == "tokens"
    assert empty.json == {"text": ""}
    assert [(other.status, other.error["code"]) for other in others] == [(404, "model_not_found")] * 2


async def test_texts_to_tokenize_have_a_bound() -> None:
    async with running() as engine:
        for prompt in ("x" * (2**21 + 1), ["x" * 2**20] * 3, [""] * 1025):
            call = await post(engine.app, "/tokenize", {"prompt": prompt})
            assert (call.status, call.error["param"]) == (400, "prompt")


async def test_abort_request_ends_exactly_what_it_names() -> None:
    async with running() as engine:
        engine.script = silence
        calls = [start(engine.app, "POST", CHAT, {"messages": HI, "rid": rid}) for rid in ("req-1", "req-10")]
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        assert (await post(engine.app, "/abort_request", {"rid": "req-1"})).json == {"aborted": 1}
        body = (await calls[0].done()).json
        assert body["choices"][0]["finish_reason"] == "abort"
        assert engine.aborted == ["req-1"]
        assert (await post(engine.app, "/abort_request", {"abort_all": True})).json == {"aborted": 1}
        await calls[1].done()
        late = await post(engine.app, "/abort_request", {"rid": "req-1"})
        assert (late.status, late.json) == (200, {"aborted": 0})
        assert (await post(engine.app, "/abort_request", {})).status == 400


async def test_flush_cache_tells_how_much_was_dropped() -> None:
    async with running() as engine:
        assert (await post(engine.app, "/flush_cache")).json == {"flushed_tokens": 7}


async def test_server_info_tells_settings_model_and_processes() -> None:
    async with running() as engine:
        info = (await get(engine.app, "/server_info")).json
    assert info["model"]["vocab_size"] == 260
    assert info["processes"]["scheduler"] == {"executor": "scripted"}
    assert info["server_args"]["page_size"] == 16


async def samples(app: App) -> dict[str, float]:
    call = await get(app, "/metrics")
    assert call.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(call.body.decode())
    return {s.name + json.dumps(s.labels, sort_keys=True): s.value for family in families for s in family.samples}


def reconciles(found: dict[str, float]) -> bool:
    ended = sum(found[f'sterna_requests_total{{"outcome": "{outcome}"}}'] for outcome in ("ok", "error", "abort"))
    return found["sterna_requests_started_total{}"] == ended + found["sterna_requests_running{}"]


async def test_counters_by_outcome_reconcile_at_every_moment() -> None:
    async with running() as engine:
        assert reconciles(await samples(engine.app))
        await post(engine.app, CHAT, {"messages": HI})
        await post(engine.app, CHAT, {"messages": HI, "max_tokens": 1000})
        engine.script = answer("", reason=FinishAbort("internal error", 500, "engine_failure"))
        await post(engine.app, CHAT, {"messages": HI})
        engine.script = silence
        call = start(engine.app, "POST", CHAT, {"messages": HI})
        while len(engine.received) < 3:
            await asyncio.sleep(0)
        found = await samples(engine.app)
        assert reconciles(found)
        assert found["sterna_requests_running{}"] == 1
        call.disconnect()
        await call.done()
        await asyncio.wait_for(engine.manager.idle_event.wait(), 30)
        found = await samples(engine.app)
    assert reconciles(found)
    assert [found[f'sterna_requests_total{{"outcome": "{outcome}"}}'] for outcome in ("ok", "error", "abort")] == [1, 2, 1]
    assert found['sterna_http_responses_total{"route": "/v1/chat/completions", "status": "400"}'] == 1


async def test_histograms_count_every_request_that_reached_their_stage() -> None:
    async with running() as engine:
        await post(engine.app, CHAT, {"messages": HI})
        await post(engine.app, "/v1/completions", {"prompt": "a"})
        found = await samples(engine.app)
    assert found["sterna_time_to_first_token_seconds_count{}"] == 2
    assert found["sterna_e2e_request_latency_seconds_count{}"] == 2
    assert found["sterna_queue_time_seconds_count{}"] == 2
    assert found['sterna_stage_seconds_count{"stage": "template"}'] == 1
    assert found['sterna_stage_seconds_count{"stage": "tokenize"}'] == 2
    assert found['sterna_inter_token_latency_seconds_bucket{"le": "+Inf"}'] == found["sterna_inter_token_latency_seconds_count{}"] > 0
    assert found["sterna_completion_tokens_total{}"] == 22


async def test_gauges_are_the_scheduler_s() -> None:
    stats = SchedulerStats(
        epoch=1,
        num_running_reqs=3,
        num_waiting_reqs=4,
        kv_total_tokens=100,
        kv_used_tokens=25,
        kv_evictable_tokens=5,
        prompt_tokens_total=40,
        cached_tokens_total=10,
        output_tokens_total=9,
        retractions_total=1,
        steps_total=8,
        max_batch_size=2,
    )
    async with running() as engine:
        engine.manager.stats = stats
        found = await samples(engine.app)
    assert found["sterna_scheduler_running{}"] == 3
    assert found["sterna_scheduler_waiting{}"] == 4
    assert found["sterna_kv_usage{}"] == 0.25
    assert found["sterna_cache_hit_rate{}"] == 0.25


async def test_one_log_line_per_request_with_counts_and_times_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sterna.request")
    async with running() as engine:
        body = {"messages": [{"role": "user", "content": "SECRET"}], "rid": "r", "user": "u1"}
        await post(engine.app, CHAT, body, headers={"x-request-id": "q"})
        await post(engine.app, CHAT, {"messages": []})
        await get(engine.app, "/health")
    first, second = (json.loads(record.getMessage()) for record in caplog.records)
    assert {name: first[name] for name in ("rid", "request_id", "route", "outcome", "user", "completion_tokens")} == {
        "rid": "r",
        "request_id": "q",
        "route": CHAT,
        "outcome": "ok",
        "user": "u1",
        "completion_tokens": 11,
    }
    assert {"templated", "tokenized", "dispatched", "first_token", "first_byte", "finished"} <= first["ms"].keys()
    assert (second["outcome"], second["status"]) == ("refused", 400)
    assert "SECRET" not in caplog.text
    assert "hello" not in caplog.text


def test_the_log_line_says_how_often_a_request_was_replayed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sterna.request")
    RequestLog().finished(ReqState("r", RequestTimes(0.0), 3, a_place(), replays=2), "ok")
    (record,) = caplog.records
    assert json.loads(record.getMessage())["replays"] == 2


@pytest.mark.parametrize("path_body", [(CHAT, {"messages": HI}), ("/v1/completions", {"prompt": ["a", "b"]})], ids=["one", "list"])
async def test_the_log_line_of_a_fault_in_tokenizing_has_a_code(
    path_body: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def to_tokenized(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a detail")

    monkeypatch.setattr(manager, "to_tokenized", to_tokenized)
    caplog.set_level(logging.INFO, logger="sterna.request")
    async with running() as engine:
        call = await post(engine.app, *path_body)
        assert (call.status, call.error["code"], engine.manager.num_live) == (500, "internal_error", 0)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "sterna.request"]
    assert {(line["outcome"], line["finish_reason"], line["code"]) for line in lines} == {("error", "abort", "internal_error")}
    assert len(lines) == len(path_body[1].get("prompt", "."))


async def test_the_description_covers_every_route_and_every_reference_resolves() -> None:
    async with running(api_key="k") as engine:
        document = json.loads(engine.app.context.openapi)
    assert document["openapi"] == "3.1.0"
    operations = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert operations == {(route.method, route.path.replace(":path", "")) for route in ROUTES}
    assert "security" not in document["paths"]["/health"]["get"]
    assert document["paths"][CHAT]["post"]["security"] == [{"key": []}]
    text = json.dumps(document)
    names = document["components"]["schemas"]
    assert text.count("#/components/schemas/") > 10
    for reference in text.split("#/components/schemas/")[1:]:
        assert reference.split('"')[0] in names


async def test_docs_loads_nothing_from_elsewhere() -> None:
    async with running() as engine:
        page = await get(engine.app, "/docs")
        script = await get(engine.app, "/docs/swagger-ui-bundle.js")
        other = await get(engine.app, "/docs/index.html")
    assert page.headers["content-type"].startswith("text/html")
    assert b"http" not in page.body
    assert script.status == 200
    assert b"SwaggerUIBundle" in script.body
    assert other.status == 404
