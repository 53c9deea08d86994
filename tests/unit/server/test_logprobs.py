"""Log-probabilities on every surface, against a scripted engine: one entry per output token, streamed or not, in the API's own shape."""

import asyncio
from typing import Any

import pytest

from byte_model import EOS, IM_END
from sterna.protocol.finish import FinishAbort, FinishLength, FinishMatchedStr, FinishMatchedToken
from sterna.protocol.generate import TokenizedGenerateReqInput
from sterna.tokenizer_manager import tokenize
from unit.server.asgi import Call, post
from unit.server.engine import Engine, answer, running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
EURO = "a€b"
"""Five tokens, three of them inside one character."""


async def ask(body: dict[str, Any], path: str, *texts: str, reason: Any = None) -> Call:
    async with running() as engine:
        engine.script = answer(*(texts or (EURO,)), reason=reason)
        call = await post(engine.app, path, body)
        assert call.status == 200, call.body
        return call


def chat_entries(call: Call) -> list[Any]:
    """All of a stream's, in order."""
    choices = [choice for event in call.events if "choices" in event for choice in event["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


# ---- chat ----


async def test_a_chat_s_entries_are_its_tokens() -> None:
    choice = (await ask({"messages": HI, "logprobs": True, "top_logprobs": 2}, CHAT)).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in content] == ["a", "\\xe2", "\\x82", "\\xac", "b"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] == EURO
    assert [entry["logprob"] for entry in content] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8, -5 / 8]
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -1 / 8, "bytes": [97]},
        {"token": "`", "logprob": -9 / 8, "bytes": [96]},
    ]


async def test_without_top_logprobs_a_chat_s_lists_of_others_are_empty() -> None:
    content = (await ask({"messages": HI, "logprobs": True}, CHAT)).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 5


@pytest.mark.parametrize("body", [{}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_for_none_gets_null(body: dict[str, Any], stream: bool) -> None:
    call = await ask({"messages": HI, "stream": stream, **body}, CHAT)
    if stream:
        assert all(choice["logprobs"] is None for event in call.events[:-1] for choice in event["choices"])
    else:
        assert call.json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_a_chat_s_stream_has_the_entries_of_the_whole_answer(options: dict[str, bool]) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 3}
    whole = (await ask(body, CHAT)).json["choices"][0]
    # Text that is held back comes later than its tokens, and the last row may bring text without a token.
    texts = ("a", "€", "", "b")
    call = await ask({**body, "stream": True, "stream_options": options}, CHAT, *texts)
    assert chat_entries(call) == whole["logprobs"]["content"]
    contents = [choice["delta"].get("content", "") for event in call.events[:-1] for choice in event["choices"]]
    assert "".join(contents) == whole["message"]["content"]
    assert all("usage" in event for event in call.events[:-1]) == bool(options)


async def held_back(engine: Engine, request: TokenizedGenerateReqInput) -> None:
    """Two tokens without text, one with all of it."""
    engine.put(request.rid, "", ids=1)
    await asyncio.sleep(0)
    engine.put(request.rid, "", ids=1)
    await asyncio.sleep(0)
    engine.put(request.rid, "late", reason=FinishLength(3), ids=1)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI, "logprobs": True}), (COMPLETIONS, {"prompt": "hi", "logprobs": 0})])
async def test_a_token_whose_text_is_held_back_has_its_chunk_in_a_stream(path: str, body: dict[str, Any]) -> None:
    async with running() as engine:
        engine.script = held_back
        call = await post(engine.app, path, {**body, "stream": True})
    choices = [choice for event in call.events[:-1] for choice in event["choices"] if choice["logprobs"]]
    # The two may come together.
    *early, last = [choice["text"] if path == COMPLETIONS else choice["delta"]["content"] for choice in choices]
    assert set(early) == {""}
    assert last == "late"


async def test_an_end_token_has_an_entry_and_adds_no_bytes() -> None:
    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        engine.put(request.rid, "", reason=FinishMatchedToken(IM_END, is_eos=True), ids=[EOS, IM_END])

    for skip in (True, False):
        async with running() as engine:
            engine.script = play
            body = {"messages": HI, "logprobs": True, "skip_special_tokens": skip}
            content = (await post(engine.app, CHAT, body)).json["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["<|eos|>", "<|im_end|>"]
        assert [bytes(entry["bytes"]) for entry in content] == ([b"", b""] if skip else [b"<|eos|>", b"<|im_end|>"])


# ---- completions ----


async def test_a_completion_s_lists_are_parallel() -> None:
    choice = (await ask({"prompt": "hi", "logprobs": 2}, COMPLETIONS)).json["choices"][0]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 1, 1, 2],
        "token_logprobs": [-1 / 8, -2 / 8, -3 / 8, -4 / 8, -5 / 8],
        "tokens": ["a", "\\xe2", "\\x82", "\\xac", "b"],
        "top_logprobs": [
            {"a": -1 / 8, "`": -9 / 8},
            {"\\xe2": -2 / 8, "\\xe1": -10 / 8},
            {"\\x82": -3 / 8, "\\x81": -11 / 8},
            {"\\xac": -4 / 8, "\\xab": -12 / 8},
            {"b": -5 / 8, "a": -13 / 8},
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "text", "offsets"),
    [
        (b"\xe2a", "\ufffda", [0, 1]),
        (b"\xe2\x82\xe2\x82\xacb", "\ufffd€b", [0, 0, 1, 1, 1, 2]),
        (b"a\x82b", "a\ufffdb", [0, 1, 2]),
        (b"\xef\xbf\xbdb", "\ufffdb", [0, 0, 0, 1]),  # a replacement character of the model's own
        (b"\xe0\x82a", "\ufffd\ufffda", [0, 1, 2]),  # 82 can't follow e0
    ],
)
async def test_what_follows_a_character_that_stays_unfinished_begins_after_it(
    data: bytes, text: str, offsets: list[int], stream: bool
) -> None:
    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        for byte in data[:-1]:
            engine.put(request.rid, "", ids=[byte])
        engine.put(request.rid, text, reason=FinishLength(len(data)), ids=[data[-1]])

    async with running() as engine:
        engine.script = play
        call = await post(engine.app, COMPLETIONS, {"prompt": "hi", "logprobs": 0, "stream": stream})
    choices = [choice for event in call.events[:-1] for choice in event["choices"]] if stream else call.json["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]] == offsets


async def test_zero_asks_for_the_token_s_own() -> None:
    choice = (await ask({"prompt": "hi", "logprobs": 0}, COMPLETIONS)).json["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -1 / 8}, {"\\xe2": -2 / 8}, {"\\x82": -3 / 8}, {"\\xac": -4 / 8}, {"b": -5 / 8}]


async def test_a_stream_of_several_completions_has_the_lists_of_each() -> None:
    body = {"prompt": ["hi", "ho"], "logprobs": 1}
    whole = (await ask(body, COMPLETIONS)).json["choices"]
    call = await ask({**body, "stream": True}, COMPLETIONS, "a", "€", "b")
    for choice in whole:
        pieces = [c["logprobs"] for event in call.events[:-1] for c in event["choices"] if c["index"] == choice["index"] and c["logprobs"]]
        assert {name: [entry for piece in pieces for entry in piece[name]] for name in pieces[0]} == choice["logprobs"]


# ---- /generate ----


async def test_generate_s_rows_have_sglang_s_shape() -> None:
    body = {"text": "hi", "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 7]}
    meta = (await ask(body, "/generate", "ab")).json["meta_info"]
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == meta["input_token_ids_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-1 / 8, 97, None], [-2 / 8, 98, None]]
    assert meta["output_top_logprobs"] == [[[-1 / 8, 97, None], [-9 / 8, 96, None]], [[-2 / 8, 98, None], [-10 / 8, 97, None]]]
    assert meta["output_token_ids_logprobs"] == [
        [[-1 / 8 - 2.5, 5, None], [-1 / 8 - 3.5, 7, None]],
        [[-2 / 8 - 2.5, 5, None], [-2 / 8 - 3.5, 7, None]],
    ]


async def test_generate_s_rows_hold_texts_where_that_is_asked_for() -> None:
    meta = (await ask({"text": "hi", "return_logprob": True, "return_text_in_logprobs": True}, "/generate")).json["meta_info"]
    assert [row[2] for row in meta["output_token_logprobs"]] == ["a", "\\xe2", "\\x82", "\\xac", "b"]
    assert "output_top_logprobs" not in meta
    assert "output_token_ids_logprobs" not in meta


async def test_each_prompt_of_a_list_has_what_it_asks_for() -> None:
    body = {
        "text": ["a", "b", "c"],
        "return_logprob": [True, False, True],
        "top_logprobs_num": [1, 0, 0],
        "token_ids_logprob": [[], [], [9]],
    }
    first, second, third = (entry["meta_info"] for entry in (await ask(body, "/generate", "x")).json)
    assert len(first["output_top_logprobs"]) == 1
    assert "output_token_ids_logprobs" not in first
    assert "output_token_logprobs" not in second
    assert third["output_token_ids_logprobs"] == [[[-1 / 8 - 4.5, 9, None]]]
    assert "output_top_logprobs" not in third


async def test_what_is_said_of_all_prompts_is_meant_for_those_that_ask() -> None:
    body = {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": 1, "token_ids_logprob": [9]}
    first, second = (entry["meta_info"] for entry in (await ask(body, "/generate", "x")).json)
    assert len(first["output_top_logprobs"]) == len(first["output_token_ids_logprobs"]) == 1
    assert not any("logprobs" in name for name in second)


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_s_rows_are_those_of_the_whole_answer(incremental: bool) -> None:
    body = {"text": "hi", "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5]}
    whole = (await ask(body, "/generate")).json["meta_info"]
    call = await ask({**body, "stream": True, "incremental": incremental}, "/generate", "a", "€", "b")
    metas = [event["meta_info"] for event in call.events[:-1]]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        lengths = [len(meta[name]) for meta in metas]
        rows = [row for meta in metas for row in meta[name]] if incremental else metas[-1][name]
        assert rows == whole[name]
        assert sum(lengths) == 5 if incremental else lengths == sorted(lengths)


# ---- all of them ----


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": HI, "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": HI, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "hi", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "hi", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "hi", "logprobs": 1, "echo": True}, "echo"),
        ("/generate", {"text": "hi", "top_logprobs_num": 1}, "top_logprobs_num"),
        ("/generate", {"text": "hi", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/generate", {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [0, 1]}, "top_logprobs_num"),
        ("/generate", {"text": ["a", "b"], "return_logprob": [False, True], "token_ids_logprob": [[1], []]}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ("/generate", {"text": ["hi", "ho"], "return_logprob": True, "top_logprobs_num": [1, 21]}, "top_logprobs_num[1]"),
        ("/generate", {"text": "hi", "return_logprob": True, "token_ids_logprob": [260]}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": True, "token_ids_logprob": [0] * 129}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": [True, True]}, "return_logprob"),
        ("/generate", {"text": ["hi", "ho"], "return_logprob": True, "top_logprobs_num": [1]}, "top_logprobs_num"),
        ("/generate", {"text": ["hi", "ho"], "return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ],
)
async def test_a_wish_that_cannot_be_met_is_a_400_that_names_its_field(path: str, body: dict[str, Any], field: str) -> None:
    async with running() as engine:
        for stream in (False, True):
            call = await post(engine.app, path, {**body, "stream": stream})
            assert (call.status, call.error["param"]) == (400, field)
        assert engine.manager.accounts.live == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20}),
        (COMPLETIONS, {"prompt": "hi", "logprobs": 20}),
        ("/generate", {"text": "hi", "return_logprob": True, "top_logprobs_num": 20, "token_ids_logprob": [0, 259]}),
    ],
)
async def test_what_is_asked_for_reaches_the_engine(path: str, body: dict[str, Any]) -> None:
    async with running() as engine:
        await post(engine.app, path, body)
        (request,) = engine.received
    params = request.sampling_params
    assert (params.return_logprob, params.top_logprobs_num) == (True, 20)
    assert params.token_ids_logprob == tuple(body.get("token_ids_logprob", ()))


async def test_tokens_of_a_stop_string_have_entries_though_their_text_is_cut() -> None:
    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        engine.put(request.rid, "ok", reason=FinishMatchedStr("END", 4, 2), ids=5)

    async with running() as engine:
        engine.script = play
        body = (await post(engine.app, CHAT, {"messages": HI, "logprobs": True, "stop": "END"})).json
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"] == 5


async def test_a_fault_after_some_tokens_keeps_their_entries() -> None:
    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        engine.put(request.rid, "ab", reason=FinishAbort("it broke", 500, "engine_failure"))

    async with running() as engine:
        engine.script = play
        call = await post(engine.app, CHAT, {"messages": HI, "logprobs": True, "stream": True})
    assert [entry["token"] for entry in chat_entries(call)] == ["a", "b"]
    assert call.events[-1]["error"]["code"] == "engine_failure"


@pytest.mark.parametrize("text", ["hi", ["hi", "ho"]])
async def test_a_fault_brings_what_a_cumulative_stream_has_not_repeated_yet(text: str | list[str]) -> None:
    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        for count in (400, 5, 1):
            engine.put(request.rid, "a" * count)
            for _ in range(50):
                await asyncio.sleep(0)
        engine.put(request.rid, "", reason=FinishAbort("it broke", 500, "engine_failure"))

    async with running() as engine:
        engine.script = play
        body = {"text": text, "stream": True, "return_logprob": True, "top_logprobs_num": 20, "token_ids_logprob": list(range(128))}
        call = await post(engine.app, "/generate", body)
    *told, error = call.events
    assert error["error"]["code"] == "engine_failure"
    last = {event["index"]: event for event in told}
    assert sum(len(event["meta_info"]["output_top_logprobs"]) for event in last.values()) == error["usage"]["completion_tokens"]
    assert "a" * 406 in [event["text"] for event in last.values()]
    assert len(told) <= 2 * len(last)  # nothing was told between the first piece and the fault


async def test_output_without_its_logprobs_is_output_that_was_lost() -> None:
    async with running() as engine:

        async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
            engine.put(request.rid, "ab", ids=2, with_logprobs=False)

        engine.script = play
        call = await post(engine.app, CHAT, {"messages": HI, "logprobs": True})
        assert call.status == 500
        await engine.abort_seen.wait()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": HI, "max_tokens": 12, "logprobs": True, "top_logprobs": 4}, "logprobs"),
        (COMPLETIONS, {"prompt": ["hi", "ho"], "max_tokens": 6, "logprobs": 4}, "logprobs"),
        ("/generate", {"text": ["a", "b", "c"], "return_logprob": [True, False, True], "token_ids_logprob": [1] * 4}, "return_logprob"),
    ],
)
@pytest.mark.parametrize(("limit", "status"), [(60, 200), (59, 400)])
async def test_an_answer_holds_so_many_logprobs_and_one_that_could_have_more_is_refused(
    path: str, body: dict[str, Any], field: str, limit: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "MAX_LOGPROBS", limit)
    async with running() as engine:
        call = await post(engine.app, path, {**body, "sampling_params": {"max_new_tokens": 6}} if path == "/generate" else body)
        assert call.status == status
        assert status == 200 or call.error["param"] == field
        assert engine.manager.num_live == engine.manager.accounts.live == 0


async def test_a_list_s_answer_that_is_large_is_the_same_json_in_pieces() -> None:
    """Large enough to be sent one prompt at a time."""
    texts = ["x" * 30_000, "y" * 30_000, "z" * 30_000]

    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        engine.put(request.rid, texts[int(request.rid.split(" ")[1])], reason=FinishLength(1), ids=1)

    async with running() as engine:
        engine.script = play
        generated = await post(engine.app, "/generate", {"text": ["a", "b", "c"]})
        completed = await post(engine.app, COMPLETIONS, {"prompt": ["a", "b", "c"], "user": '"choices":[]'})
    assert [entry["text"] for entry in generated.json] == texts
    assert [choice["text"] for choice in completed.json["choices"]] == texts
    assert completed.json["usage"]["completion_tokens"] == 3
    for call in (generated, completed):
        assert call.headers["content-length"] == str(len(call.body))
        assert call.sent.qsize() > 3
