"""POST /v1/chat/completions against a scripted engine."""

import asyncio

import pytest

from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken
from unit.server.asgi import get, post, start
from unit.server.engine import Engine, answer, running, silence

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def test_a_full_response_has_openai_s_shape() -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"model": "bytes", "messages": HI, "rid": "r1"})
    assert call.status == 200
    body = call.json
    assert body["id"] == "r1"
    assert body["object"] == "chat.completion"
    assert body["model"] == "bytes"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 11,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_a_stream_is_role_then_deltas_then_one_finish_then_usage_then_done() -> None:
    async with running() as engine:
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        engine.script = answer("he", "", "llo", " wörld")
        events = (await post(engine.app, PATH, body)).events
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello wörld"
    assert all(len(c["choices"]) == 1 for c in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert {c["id"] for c in events[:-1]} == {usage["id"]}
    assert {c["object"] for c in events[:-1]} == {"chat.completion.chunk"}


async def test_without_include_usage_no_chunk_has_a_usage_key() -> None:
    async with running() as engine:
        events = (await post(engine.app, PATH, {"messages": HI, "stream": True})).events
    assert all("usage" not in chunk for chunk in events[:-1])


async def test_continuous_usage_counts_up_in_every_chunk() -> None:
    async with running() as engine:
        asked = asyncio.Event()

        async def play(engine: Engine, request: object) -> None:
            engine.put("r", "ab")
            await asked.wait()
            engine.put("r", "c", reason=FinishLength(3))

        engine.script = play
        options = {"include_usage": True, "continuous_usage_stats": True}
        call = start(engine.app, "POST", PATH, {"messages": HI, "stream": True, "stream_options": options, "rid": "r"})
        await call.next_message()
        await call.next_message()
        asked.set()
        await call.done()
    counts = [chunk["usage"]["completion_tokens"] for chunk in call.events[:-1]]
    assert counts == [2, 2, 3, 3, 3]
    assert call.events[-2]["choices"] == []


async def test_deltas_that_queued_up_while_the_client_was_slow_are_merged() -> None:
    async with running() as engine:

        async def play(engine: Engine, request: object) -> None:
            for text in "abcdefgh":
                engine.put("r", text)
            engine.put("r", "i", reason=FinishLength(9))

        engine.script = play
        events = (await post(engine.app, PATH, {"messages": HI, "stream": True, "rid": "r"})).events
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in events[:-1]]
    assert contents == ["", "abcdefghi", None]


@pytest.mark.parametrize(
    ("reason", "name", "matched"),
    [
        (FinishMatchedToken(257, is_eos=True), "stop", 257),
        (FinishMatchedStr("END", 3, 5), "stop", "END"),
        (FinishLength(11), "length", None),
        (FinishAbort("aborted", 499, "aborted"), "abort", None),
    ],
)
async def test_the_finish_reason_is_told_alike_streamed_or_not(reason: object, name: str, matched: object) -> None:
    async with running() as engine:
        engine.script = answer("hello", " world", reason=reason)
        full = (await post(engine.app, PATH, {"messages": HI})).json["choices"][0]
        events = (await post(engine.app, PATH, {"messages": HI, "stream": True})).events
    last = events[-2]["choices"][0]
    assert (full["finish_reason"], full["matched_stop"]) == (name, matched)
    assert (last["finish_reason"], last["matched_stop"]) == (name, matched)


async def test_the_template_gets_messages_as_sent_and_its_text_is_tokenized_without_special_tokens() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "mood": "merry"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    async with running(context_len=512) as engine:
        call = await post(engine.app, PATH, {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
        (request,) = engine.received
    assert call.status == 200
    assert engine.template.messages == [
        {"role": "system", "content": "be brief"},
        messages[1],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        messages[3],
    ]
    assert engine.template.kwargs == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "enable_thinking": False,
    }
    assert bytes(request.input_ids).startswith(b"[s]be brief[u]")


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt", "_private", "no name"])
async def test_template_kwargs_can_t_stand_in_for_what_rendering_passes(name: str) -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"messages": HI, "chat_template_kwargs": {name: 1}})
    assert (call.status, call.error["param"]) == (400, "chat_template_kwargs")


async def test_a_continued_message_opens_no_turn() -> None:
    async with running() as engine:
        body = {"messages": [*HI, {"role": "assistant", "content": "Once"}], "continue_final_message": True}
        await post(engine.app, PATH, body)
        assert bytes(engine.received[0].input_ids).endswith(b"[a]Once")
        refused = await post(engine.app, PATH, {**body, "add_generation_prompt": True})
    assert engine.template.kwargs["continue_final_message"] is True
    assert (refused.status, refused.error["param"]) == (400, "add_generation_prompt")


async def test_a_template_that_raises_is_a_400_with_its_text() -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"messages": [{"role": "user", "content": "RAISE"}], "stream": True})
        assert engine.manager.num_live == 0
    assert call.status == 400
    assert "roles must alternate" in call.error["message"]


async def test_a_model_without_a_template_says_so() -> None:
    async with running(template=False) as engine:
        call = await post(engine.app, PATH, {"messages": HI})
    assert (call.status, call.error["code"]) == (400, "no_chat_template")


async def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    async with running() as engine:
        await post(engine.app, PATH, {"messages": HI})
        await post(engine.app, PATH, {"messages": HI, "max_completion_tokens": 5})
    assert [request.sampling_params.max_new_tokens for request in engine.received] == [64 - 8, 5]


@pytest.mark.parametrize(("room", "status"), [(-1, 400), (0, 200), (1, 200)])
async def test_a_prompt_one_short_of_the_context_fits_and_one_more_token_does_not(room: int, status: int) -> None:
    async with running() as engine:
        content = "x" * (64 - len("[u][a]") - 1 - room)
        call = await post(engine.app, PATH, {"messages": [{"role": "user", "content": content}]})
    assert call.status == status
    if status == 400:
        assert (call.error["code"], call.error["param"]) == ("context_length_exceeded", "messages")


async def test_max_tokens_beyond_the_context_is_refused_by_name() -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"messages": HI, "max_tokens": 57})
        fits = await post(engine.app, PATH, {"messages": HI, "max_tokens": 56})
    assert (call.status, call.error["code"], call.error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert fits.status == 200


async def test_the_model_s_own_sampling_defaults_hold_unless_openai_s_are_asked_for() -> None:
    async with running() as engine:
        await post(engine.app, PATH, {"messages": HI})
        await post(engine.app, PATH, {"messages": HI, "temperature": 0, "top_p": None})
    first, second = (request.sampling_params for request in engine.received)
    assert (first.temperature, first.top_p) == (0.2, 0.9)
    assert (second.temperature, second.top_p) == (0.0, 0.9)
    async with running(sampling_defaults="openai") as engine:
        await post(engine.app, PATH, {"messages": HI})
    assert (engine.received[0].sampling_params.temperature, engine.received[0].sampling_params.top_p) == (1.0, 1.0)


async def test_a_cache_salt_becomes_the_cache_namespace() -> None:
    async with running() as engine:
        await post(engine.app, PATH, {"messages": HI, "cache_salt": "tenant"})
    assert engine.received[0].cache_namespace.salt == "tenant"


async def test_a_live_rid_is_refused_and_the_first_request_is_unharmed() -> None:
    async with running() as engine:
        engine.script = silence
        first = start(engine.app, "POST", PATH, {"messages": HI, "rid": "same", "stream": True})
        while not engine.received:
            await asyncio.sleep(0)
        second = await post(engine.app, PATH, {"messages": HI, "rid": "same"})
        assert (second.status, second.error["code"], second.error["param"]) == (400, "duplicate_rid", "rid")
        engine.put("same", "ok", reason=FinishLength(2))
        await first.done()
        assert first.events[-1] == "[DONE]"
        engine.script = answer("again")
        assert (await post(engine.app, PATH, {"messages": HI, "rid": "same"})).status == 200


@pytest.mark.parametrize(("model", "status"), [("bytes", 200), (None, 200), ("gpt-4o", 404)])
async def test_only_the_served_model_is_served(model: str | None, status: int) -> None:
    async with running() as engine:
        call = await post(engine.app, PATH, {"messages": HI, "model": model})
        card = await get(engine.app, f"/v1/models/{model or 'bytes'}")
    assert call.status == card.status == status
    if status == 404:
        assert (call.error["code"], call.error["param"]) == ("model_not_found", "model")
