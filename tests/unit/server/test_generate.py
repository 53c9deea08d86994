"""POST /generate, in SGLang's shapes, against a scripted engine."""

import asyncio
import time
from typing import Any

import pytest

from sterna.config.server_args import ServerArgs
from sterna.protocol.finish import ABORTED, FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken
from sterna.server.native.generate.response import to_meta_info
from sterna.tokenizer_manager.admission import ANY_TERMS, Accounts
from sterna.tokenizer_manager.req_state import JournalReader, ReqState, RequestTimes
from unit.server.asgi import post, start
from unit.server.engine import Engine, answer, running, silence

PATH = "/generate"


async def test_a_single_prompt_gets_an_object_and_a_list_gets_a_list() -> None:
    async with running() as engine:
        single = (await post(engine.app, PATH, {"text": "hi", "rid": "r"})).json
        several = (await post(engine.app, PATH, {"text": ["hi", "ho"]})).json
        ids = (await post(engine.app, PATH, {"input_ids": [1, 2]})).json
        one = (await post(engine.app, PATH, {"input_ids": [[1, 2]]})).json
    assert single["text"] == ids["text"] == "hello world"
    assert single["output_ids"] == list(b"hello world")
    meta = single["meta_info"]
    assert meta.pop("e2e_latency") is not None
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "length", "length": 11},
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "cached_tokens": 2,
    }
    assert [entry["text"] for entry in several] == ["hello world"] * 2
    assert len({entry["meta_info"]["id"] for entry in several}) == 2
    assert len(one) == 1


@pytest.mark.parametrize(
    ("reason", "shape"),
    [
        (FinishMatchedToken(257, is_eos=True), {"type": "stop", "matched": 257}),
        (FinishMatchedStr("END", 3, 5), {"type": "stop", "matched": "END"}),
        (FinishLength(11), {"type": "length", "length": 11}),
        (FinishAbort("aborted", 499, "aborted"), {"type": "abort", "message": "aborted"}),
    ],
)
async def test_finish_reasons_have_sglang_s_shape(reason: Any, shape: dict[str, Any]) -> None:
    async with running() as engine:
        engine.script = answer("hello", " world", reason=reason)
        body = (await post(engine.app, PATH, {"text": "hi"})).json
    assert body["meta_info"]["finish_reason"] == shape


async def stream(engine: Engine, body: dict[str, Any]) -> list[Any]:
    """Three rows, each sent alone."""
    turn = asyncio.Event()

    async def play(engine: Engine, request: Any) -> None:
        for text, reason in (("ab", None), ("c", None), ("d", FinishLength(4))):
            engine.put(request.rid, text, reason=reason)
            await turn.wait()
            turn.clear()

    engine.script = play
    call = start(engine.app, "POST", PATH, {"text": "hi", "stream": True, **body})
    while not call.task.done():
        await call.next_message()
        turn.set()
        await asyncio.sleep(0)
    return call.events


async def test_a_stream_is_cumulative_by_default() -> None:
    async with running() as engine:
        *events, done = await stream(engine, {})
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["ab", "abc", "abcd"]
    assert [event["output_ids"] for event in events] == [[97, 98], [97, 98, 99], [97, 98, 99, 100]]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True, True, False]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [2, 3, 4]


@pytest.mark.parametrize(("args", "body"), [({}, {"incremental": True}), ({"incremental_streaming_output": True}, {})])
async def test_an_incremental_stream_holds_deltas(args: dict[str, Any], body: dict[str, Any]) -> None:
    async with running(**args) as engine:
        *events, done = await stream(engine, body)
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["ab", "c", "d"]
    assert [event["output_ids"] for event in events] == [[97, 98], [99], [100]]


async def test_a_streamed_list_says_which_prompt_an_event_is_of() -> None:
    async with running() as engine:
        events = (await post(engine.app, PATH, {"text": ["a", "b"], "stream": True})).events
    assert events[-1] == "[DONE]"
    assert {event["index"] for event in events[:-1]} == {0, 1}


async def test_an_event_s_counts_are_those_of_its_own_tokens() -> None:
    async with running() as engine:

        async def play(engine: Engine, request: Any) -> None:
            for index in range(20):
                engine.put(request.rid, "ab", reason=FinishLength(40) if index == 19 else None)
                await asyncio.sleep(0)

        engine.script = play
        body = {"text": ["a", "b", "c"], "stream": True, "incremental": True}
        *events, _ = (await post(engine.app, PATH, body)).events
    seen = [0, 0, 0]
    for event in events:
        seen[event["index"]] += len(event["output_ids"])
        assert event["meta_info"]["completion_tokens"] == seen[event["index"]]
    assert seen == [40, 40, 40]
    assert len(events) > 3


async def test_sampling_params_may_be_one_object_or_one_per_prompt() -> None:
    async with running() as engine:
        one = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 3, "temperature": 0, "sampling_seed": 5}}
        assert (await post(engine.app, PATH, one)).status == 200
        each = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 3}, {"min_new_tokens": 2}]}
        assert (await post(engine.app, PATH, each)).status == 200
    params = [request.sampling_params for request in engine.received]
    assert [(p.max_new_tokens, p.temperature, p.seed) for p in params[:2]] == [(3, 0.0, 5)] * 2
    assert [(p.max_new_tokens, p.min_new_tokens) for p in params[2:]] == [(3, 0), (63, 2)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"text": ["a"] * 1025}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [260]}, "input_ids"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 64}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**65}}, "sampling_params.sampling_seed"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]}, "sampling_params[1].top_p"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "rid": "white space"}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "session_params": {}}, "session_params.id"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_its_field(body: dict[str, Any], param: str) -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, body)
        assert (call.status, call.error["param"]) == (400, param)
        assert engine.manager.accounts.live == 0


async def test_each_prompt_of_a_list_can_have_a_rid_of_its_own() -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", PATH, {"text": ["a", "b"], "rid": ["x", "y"]})
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        assert (await post(engine.app, "/abort_request", {"rid": "x"})).json == {"aborted": 1}
        engine.put("y", "fine", reason=FinishLength(4))
        await call.done()
    assert [entry["meta_info"]["finish_reason"]["type"] for entry in call.json] == ["abort", "length"]


@pytest.mark.parametrize(("terminal_row", "seconds"), [(True, 1.0), (False, 60.0)])
def test_the_latency_is_that_of_the_whole_request_where_the_scheduler_has_not_ended_it(terminal_row: bool, seconds: float) -> None:
    now = time.monotonic()
    times = RequestTimes(now - 60, last_token=now - 59, detokenized=now - 58 if terminal_row else None)
    state = ReqState("r", times, 1, Accounts(ServerArgs()).admit(ANY_TERMS)[0], finished_reason=ABORTED)
    latency = to_meta_info(JournalReader(state, lambda *_: None), ABORTED, None).e2e_latency
    assert latency is not None
    assert seconds <= latency < seconds + 30
