"""POST /v1/completions against a scripted engine."""

import asyncio
from typing import Any

import pytest

from sterna.protocol.finish import FinishLength
from unit.server.asgi import post, start
from unit.server.engine import Engine, answer, running, silence

PATH = "/v1/completions"


async def test_a_full_response_has_openai_s_shape() -> None:
    async with running() as engine:
        body = (await post(engine.app, PATH, {"prompt": "hi"})).json
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length", "matched_stop": None},
    ]
    assert body["usage"]["total_tokens"] == 13


async def test_max_tokens_defaults_to_sixteen_or_to_what_the_context_leaves() -> None:
    async with running() as engine:
        await post(engine.app, PATH, {"prompt": "hi"})
        await post(engine.app, PATH, {"prompt": "x" * 60})
        refused = await post(engine.app, PATH, {"prompt": "x" * 60, "max_tokens": 5})
    assert [request.sampling_params.max_new_tokens for request in engine.received] == [16, 4]
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "max_tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["a"], [[97]]),
        ([[97]], [[97]]),
    ],
)
async def test_the_four_forms_of_a_prompt(prompt: Any, inputs: list[list[int]]) -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"prompt": prompt})
        assert call.status == 200
        assert [request.input_ids for request in engine.received] == inputs
    assert [choice["index"] for choice in call.json["choices"]] == list(range(len(inputs)))


@pytest.mark.parametrize(
    "prompt", [[], [[]], "", [""], ["a", 1], [1, [2]], ["a", [1]], [1.5], [None], {}, None, 5, [-1], [260], [[260]], [10**30]]
)
async def test_anything_else_is_a_400_that_names_prompt(prompt: Any) -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"prompt": prompt})
        assert call.status == 400
        assert call.error["param"].startswith("prompt")
        assert engine.manager.accounts.live == 0


async def test_too_many_prompts_are_refused() -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"prompt": ["a"] * 1025})
    assert (call.status, call.error["param"]) == (400, "prompt")


async def test_a_list_streams_interleaved_with_one_finish_per_index_and_one_usage() -> None:
    async with running() as engine:
        turns = [asyncio.Event() for _ in range(2)]

        async def play(engine: Engine, request: Any) -> None:
            index = int(request.rid.split()[-1])
            for letter in "xy":
                engine.put(request.rid, f"{letter}{index}")
                await turns[index].wait()
            engine.put(request.rid, "z", reason=FinishLength(5))

        engine.script = play
        body = {"prompt": ["a", "bb"], "stream": True, "stream_options": {"include_usage": True}, "rid": "list"}
        call = start(engine.app, "POST", PATH, body)
        while len(call.body.split(b"\n\n")) < 3:
            await call.next_message()
        turns[1].set()
        turns[0].set()
        await call.done()
    *chunks, usage, done = call.events
    assert done == "[DONE]"
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index) for index in (0, 1)]
    assert texts == ["x0y0z", "x1y1z"]
    finishes = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"] is not None]
    assert sorted(finishes) == [0, 1]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert {chunk["id"] for chunk in chunks} == {"list"}


async def test_one_seed_over_a_list_is_each_prompt_s_seed_and_without_one_each_draws_its_own() -> None:
    async with running() as engine:
        await post(engine.app, PATH, {"prompt": ["a", "b", "c"], "seed": -1})
        seeds = [request.sampling_params.seed for request in engine.received]
        assert seeds == [2**64 - 1] * 3
        engine.received.clear()
        await post(engine.app, PATH, {"prompt": ["a", "b", "c"]})
        assert len({request.sampling_params.seed for request in engine.received}) == 3


async def test_aborting_a_list_by_its_rid_ends_every_member() -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", PATH, {"prompt": ["a", "b"], "rid": "list"})
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        twice = await post(engine.app, PATH, {"prompt": ["a", "b"], "rid": "list"})
        assert (twice.status, twice.error["code"]) == (400, "duplicate_rid")
        single = await post(engine.app, PATH, {"prompt": "a", "rid": "list"})
        assert (single.status, single.error["code"]) == (400, "duplicate_rid")
        prefix = await post(engine.app, "/abort_request", {"rid": "lis"})
        assert prefix.json == {"aborted": 0}
        aborted = await post(engine.app, "/abort_request", {"rid": "list"})
        assert aborted.json == {"aborted": 2}
        await call.done()
        assert [choice["finish_reason"] for choice in call.json["choices"]] == ["abort", "abort"]
        engine.script = answer("ok")
        assert (await post(engine.app, PATH, {"prompt": ["a", "b"], "rid": "list"})).status == 200


async def test_sampling_parameters_reach_the_engine_as_sent() -> None:
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {"5": 2},
        "seed": 7,
        "stop": ["x", "y", "x"],
        "stop_token_ids": [9, 9],
        "min_tokens": 1,
        "max_tokens": 4,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    async with running() as engine:
        assert (await post(engine.app, PATH, body)).status == 200
    params = engine.received[0].sampling_params
    expected = {**body, "logit_bias": {5: 2.0}, "stop": ("x", "y"), "stop_token_ids": (9,), "max_new_tokens": 4, "min_new_tokens": 1}
    for name in ("prompt", "min_tokens", "max_tokens"):
        del expected[name]
    assert {name: getattr(params, name) for name in expected} == expected


async def test_a_list_under_the_rid_of_a_live_request_is_refused() -> None:
    async with running() as engine:
        engine.script = silence
        call = start(engine.app, "POST", PATH, {"prompt": "a", "rid": "one"})
        while not engine.received:
            await asyncio.sleep(0)
        twice = await post(engine.app, PATH, {"prompt": ["a", "b"], "rid": "one"})
        assert (twice.status, twice.error["code"], len(engine.received)) == (400, "duplicate_rid", 1)
        assert (await post(engine.app, "/abort_request", {"rid": "one"})).json == {"aborted": 1}
        await call.done()
