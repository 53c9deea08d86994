"""What the official client sees, over a real socket. The engine behind the server is scripted."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from byte_model import EOS
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedToken
from sterna.server.http_server import HTTPServer
from unit.server.engine import Engine, answer, running, silence

HI: Any = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def serving(**args: Any) -> AsyncIterator[tuple[Engine, openai.AsyncOpenAI]]:
    async with running(**args) as engine:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        server = HTTPServer(engine.app, engine.args, listener)
        await server.startup()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        try:
            http = openai.DefaultAsyncHttpxClient(verify=False)  # which spares reading the system's certificates
            key = args.get("api_key", "none")
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
                yield engine, client
        finally:
            await server.shutdown()


async def test_a_chat_streamed_or_not_is_the_same_text_and_usage() -> None:
    async with serving() as (engine, client):
        engine.script = answer("he", "llo", " wörld")
        full = await client.chat.completions.create(model="bytes", messages=HI)
        stream = await client.chat.completions.create(
            model="bytes", messages=HI, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
        )
        chunks = [chunk async for chunk in stream]
        assert full.choices[0].message.content == "hello wörld"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello wörld"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage == full.usage
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == full.choices[0].finish_reason == "length"
        assert engine.received[1].sampling_params.top_k == 5


async def test_completions_of_a_list_streamed_or_not() -> None:
    async with serving() as (_, client):
        full = await client.completions.create(model="bytes", prompt=["a", "b"])
        stream = await client.completions.create(model="bytes", prompt=["a", "b"], stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [choice.text for choice in full.choices] == texts == ["hello world"] * 2


async def test_a_chat_s_logprobs_streamed_or_not() -> None:
    async with serving() as (engine, client):
        engine.script = answer("he", "llo", " wörld", reason=FinishMatchedToken(EOS, is_eos=True))
        full = await client.chat.completions.create(model="bytes", messages=HI, logprobs=True, top_logprobs=2)
        async with client.chat.completions.stream(model="bytes", messages=HI, logprobs=True, top_logprobs=2) as stream:
            accumulated = (await stream.get_final_completion()).choices[0].logprobs
        logprobs = full.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert accumulated == logprobs
        assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == "hello wörld"
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 12


async def test_a_completion_s_logprobs_streamed_or_not() -> None:
    async with serving() as (engine, client):
        engine.script = answer("he", "llo")
        full = (await client.completions.create(model="bytes", prompt="a", logprobs=1)).choices[0].logprobs
        stream = await client.completions.create(model="bytes", prompt="a", logprobs=1, stream=True)
        pieces = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
        assert full is not None
        assert full.tokens == list("hello")
        assert [offset for piece in pieces for offset in piece.text_offset or ()] == full.text_offset == [0, 1, 2, 3, 4]
        assert [top for piece in pieces for top in piece.top_logprobs or ()] == full.top_logprobs


async def test_models_are_listed() -> None:
    async with serving() as (_, client):
        assert [model.id async for model in client.models.list()] == ["bytes"]
        assert (await client.models.retrieve("bytes")).id == "bytes"


@pytest.mark.parametrize("stream", [False, True])
async def test_each_refusal_is_the_sdk_s_own_exception(stream: bool) -> None:
    async with serving(api_key="right") as (engine, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="bytes", messages=HI, temperature=-1, stream=stream)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt", messages=HI, stream=stream)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model="bytes", messages=HI, stream=stream)
        engine.script = answer("", reason=FinishAbort("The request queue is full.", 429, "queue_full"))
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="bytes", messages=HI, stream=stream)
        assert (full.value.status_code, full.value.code) == (429, "queue_full")


async def test_a_fault_in_mid_stream_raises() -> None:
    async with serving() as (engine, client):
        go_on = asyncio.Event()

        async def play(engine: Engine, request: Any) -> None:
            engine.put(request.rid, "abc")
            await go_on.wait()
            engine.put(request.rid, "", reason=FinishAbort("internal error", 500, "engine_failure"))

        engine.script = play
        stream = await client.chat.completions.create(model="bytes", messages=HI, stream=True)
        contents = []

        async def read() -> None:
            async for chunk in stream:
                contents.append(chunk.choices[0].delta.content)
                go_on.set()

        with pytest.raises(openai.APIError, match="internal error"):
            await read()
        assert contents == ["", "abc"]


async def test_comments_before_and_between_chunks_are_skipped() -> None:
    async with serving(sse_commit_after=0, sse_keep_alive=0.02) as (engine, client):
        engine.script = silence
        stream = await client.chat.completions.create(model="bytes", messages=HI, stream=True, extra_body={"rid": "r"})
        lines = stream.response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        await stream.close()
        await asyncio.wait_for(engine.abort_seen.wait(), 30)

        async def late(engine: Engine, request: Any) -> None:
            await asyncio.sleep(0.1)  # longer than the keep-alive: the comments are what is tested
            engine.put(request.rid, "late", reason=FinishLength(4))

        engine.script = late
        stream = await client.chat.completions.create(model="bytes", messages=HI, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["", "late", None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_aborts_its_request(stream: bool) -> None:
    async with serving() as (engine, client):
        engine.script = silence
        call = asyncio.create_task(client.chat.completions.create(model="bytes", messages=HI, stream=stream))
        while not engine.received:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait_for(engine.abort_seen.wait(), 30)
        await asyncio.wait_for(engine.manager.idle_event.wait(), 30)


async def test_sixty_four_clients_at_once_each_get_their_own_text() -> None:
    async with serving(context_len=256) as (engine, client):

        async def echo(engine: Engine, request: Any) -> None:
            text = bytes(request.input_ids).decode()
            for index, letter in enumerate(text):
                last = index == len(text) - 1
                engine.put(request.rid, letter, reason=FinishLength(len(text)) if last else None)
                await asyncio.sleep(0)

        engine.script = echo

        async def one(index: int) -> str:
            stream = await client.completions.create(model="bytes", prompt=f"client {index} " * 5, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(index) for index in range(64)))
        assert texts == [f"client {index} " * 5 for index in range(64)]
        assert len({request.rid for request in engine.received}) == 64


async def test_a_session_goes_on_through_the_sdk_and_its_refusals_are_the_sdk_s_exceptions() -> None:
    async with serving(context_len=512, max_sessions=1) as (engine, client):
        session = await client.with_options(base_url=str(client.base_url).removesuffix("v1/")).post("/open_session", cast_to=str, body={})
        session = session.strip('"')
        first = await client.chat.completions.create(model="bytes", messages=HI, extra_body={"session_params": {"id": session}})
        place = {"session_params": {"id": session, "rid": first.id}}
        stream = await client.chat.completions.create(model="bytes", messages=HI, stream=True, extra_body=place)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
        assert bytes(engine.received[1].input_ids) == b"[u]hi[a]hello world[u]hi[a]"
        engine.script = silence
        running_turn = asyncio.create_task(client.completions.create(model="bytes", prompt="hi", extra_body=place))
        while len(engine.received) < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(openai.ConflictError) as busy:
            await client.completions.create(model="bytes", prompt="hi", extra_body=place)
        assert busy.value.code == "session_busy"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="bytes", prompt="hi", stream=True, extra_body={"session_params": {"id": "x"}})
        assert (missing.value.code, missing.value.param) == ("session_not_found", "session_params.id")
        with pytest.raises(openai.RateLimitError) as full:
            await client.with_options(base_url=str(client.base_url).removesuffix("v1/")).post("/open_session", cast_to=str, body={})
        assert full.value.code == "too_many_sessions"
        engine.put(engine.received[2].rid, "done", reason=FinishLength(4))
        assert (await running_turn).choices[0].text == "done"
