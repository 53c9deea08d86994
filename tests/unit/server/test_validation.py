"""What a body may hold: each fault is a 400 that names its field, and the server is as healthy as before."""

import json
import logging
from typing import Any

import pytest

from sterna.server.body import MAX_WARNED_NAMES
from unit.server.asgi import post
from unit.server.engine import running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
MINIMAL: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hi"}, "/generate": {"text": "hi"}}


BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 5.5),
    ("max_tokens", True),
    ("max_tokens", 1e12),
    ("max_tokens", 10**12),
    ("max_tokens", 10**30),
    ("min_tokens", -1),
    ("min_tokens", 60),
    ("temperature", -1),
    ("temperature", 1e6),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("n", 5_000_000),
    ("n", 0),
    ("n", 2),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 100_000),
    ("stop", "x" * 2000),
    ("stop_token_ids", [260]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [0] * 100_000),
    ("logit_bias", {"260": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {str(i): 1 for i in range(100_000)}),
    ("stream_options", {"include_usage": True}),
    ("rid", ""),
    ("rid", "has space"),
    ("rid", "x" * 200),
    ("user", 7),
    ("model", 7),
    ("stream", "yes"),
    ("logprobs", "5"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("service_tier", "flex"),
    ("response_format", {"type": "json_object"}),
    ("regex", "a+"),
    ("priority", 1),
    ("best_of", 3),
    ("lora_path", "x"),
    ("guided_json", {}),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda v: repr(v)[:30])
async def test_a_bad_value_is_a_400_that_names_its_field(path: str, field: str, value: Any) -> None:
    async with running() as engine:
        for stream in (False, True):
            call = await post(engine.app, path, {"stream": stream, **MINIMAL[path], field: value})
            if field == "stream_options" and stream:
                continue
            assert call.status == 400
            assert call.error["param"] == field
            assert field in call.error["message"]
            assert call.error["type"] == "invalid_request_error"
        assert engine.manager.num_live == 0
        assert engine.manager.accounts.live == 0
        assert (await post(engine.app, path, MINIMAL[path])).status == 200


async def test_one_bad_element_is_named_by_its_path() -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": HI, "stop_token_ids": [None]})
    assert call.error["param"] == "stop_token_ids[0]"


GOOD_VALUES: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 2),
    ("top_p", 1),
    ("top_k", 0),
    ("top_k", -1),
    ("seed", -1),
    ("seed", 2**64 - 1),
    ("stop", []),
    ("stop", ["a"] * 16),
    ("n", 1),
    ("n", 1.0),
    ("best_of", 1),
    ("service_tier", "auto"),
    ("store", False),
    ("metadata", {}),
    ("logit_bias", {}),
    ("logit_bias", {"259": -100}),
    ("response_format", {"type": "text"}),
    ("user", "someone"),
    ("priority", 0),
    ("min_tokens", 0),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), GOOD_VALUES)
async def test_a_good_value_passes(path: str, field: str, value: Any) -> None:
    async with running() as engine:
        call = await post(engine.app, path, {**MINIMAL[path], field: value})
    assert call.status == 200, call.body


CHAT_ONLY_DEFAULTS = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "verbosity": "medium",
    "separate_reasoning": True,
}


@pytest.mark.parametrize("field", CHAT_ONLY_DEFAULTS)
async def test_an_unbuilt_field_at_its_default_changes_nothing(field: str) -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": HI, field: CHAT_ONLY_DEFAULTS[field]})
    assert call.status == 200


@pytest.mark.parametrize("field", ["tools", "tool_choice", "functions", "audio", "prediction", "reasoning_effort", "chat_template"])
async def test_an_unbuilt_field_is_refused_by_name(field: str) -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": HI, field: [{"x": 1}]})
    assert (call.status, call.error["param"], call.error["code"]) == (400, field, "unsupported_parameter")


async def test_an_unbuilt_field_with_a_number_that_no_float_holds_is_refused_by_name() -> None:
    async with running() as engine:
        call = await post(engine.app, COMPLETIONS, b'{"prompt": "x", "n": 1e400}')
    assert (call.status, call.error["param"], call.error["code"]) == (400, "n", "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
async def test_null_is_absent_in_every_optional_field(path: str) -> None:
    async with running() as engine:
        openapi = json.loads(engine.app.context.openapi)
        name = {CHAT: "ChatCompletionBody", COMPLETIONS: "CompletionRequest", "/generate": "GenerateBody"}[path]
        fields = openapi["components"]["schemas"][name]["properties"]
        nulls = {field: None for field in fields if field not in MINIMAL[path]}
        assert len(nulls) > 5
        call = await post(engine.app, path, {**nulls, **MINIMAL[path]})
        assert call.status == 200, call.body
        unbuilt = await post(engine.app, path, {**dict.fromkeys(["n", "tools", "logprobs", "best_of", "lora_path"]), **MINIMAL[path]})
    assert unbuilt.status == 200


async def test_a_field_that_nobody_defines_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running() as engine:
        for _ in range(3):
            assert (await post(engine.app, CHAT, {"messages": HI, "colour": "red", "size": {"a": [1]}})).status == 200
    assert [record.args for record in caplog.records] == [("colour",), ("size",)]


async def test_each_app_warns_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        async with running() as engine:
            await post(engine.app, CHAT, {"messages": HI, "colour": "red"})
    assert [record.args for record in caplog.records] == [("colour",)] * 2


async def test_warnings_about_unknown_fields_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running() as engine:
        for batch in range(3):
            unknown = {f"f{batch}-{i}": 1 for i in range(MAX_WARNED_NAMES // 2)} | {"x" * 5000: 1}
            assert (await post(engine.app, CHAT, {"messages": HI, **unknown})).status == 200
    assert len(caplog.records) == MAX_WARNED_NAMES
    assert max(len(str(record.args)) for record in caplog.records) < 100


async def test_strict_fields_refuses_what_nobody_defines() -> None:
    async with running(strict_fields=True) as engine:
        call = await post(engine.app, CHAT, {"messages": HI, "colour": "red"})
        nested = await post(engine.app, "/generate", {"text": "a", "sampling_params": {"colour": 1}})
    assert (call.status, call.error["param"], call.error["code"]) == (400, "colour", "unknown_parameter")
    assert nested.error["param"] == "sampling_params.colour"


BOMB = b"[" * 100_000
MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"messages": [}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'\xff\xfe{"messages": 1}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "a"}], "x": ' + BOMB + b"}",
    b'{"messages": ' + BOMB + b"}",
    b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}]}",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": ' + b"[" * 2000 + b"]" * 2000 + b"}",
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda v: repr(v)[:40])
async def test_a_malformed_body_is_a_400(data: bytes) -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, data)
        assert call.status == 400, call.body
        assert call.error["message"]
        assert (await post(engine.app, CHAT, {"messages": HI})).status == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([*HI, 5], "messages[1]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "zzz"}]}], "messages[0].content[1].type"),
    ],
)
async def test_a_bad_message_is_named_by_its_path(messages: Any, param: str) -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": messages})
    assert (call.status, call.error["param"]) == (400, param)


async def test_two_different_limits_are_refused_and_two_equal_ones_are_not() -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6})
        same = await post(engine.app, CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 5})
    assert (call.status, call.error["param"]) == (400, "max_tokens")
    assert same.status == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_a_413_with_or_without_its_length_said(declared: bool) -> None:
    async with running(max_body_bytes=2000) as engine:
        data = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()
        headers = {"content-length": str(len(data))} if declared else {}
        call = await post(engine.app, CHAT, data, headers=headers, chunk=100)
        assert (call.status, call.error["code"]) == (413, "payload_too_large")
        assert (await post(engine.app, CHAT, {"messages": HI}, chunk=7)).status == 200


async def test_bodies_held_at_once_have_a_bound_and_give_their_room_back() -> None:
    async with running() as engine:
        engine.app._budget.limit = 60
        call = await post(engine.app, CHAT, {"messages": HI, "user": "x" * 100}, chunk=10)
        assert (call.status, call.error["code"]) == (503, "overloaded")
        assert engine.app._budget.held == 0
        assert (await post(engine.app, CHAT, {"messages": HI}, chunk=10)).status == 200
        assert engine.app._budget.held == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt"),
        ("/generate", {"text": "x" * 100_000}, "text"),
    ],
)
async def test_a_text_that_is_certain_not_to_fit_is_refused_before_it_is_tokenized(path: str, body: dict[str, Any], param: str) -> None:
    async with running() as engine:

        def encode(text: str, **_: Any) -> list[int]:
            raise AssertionError("tokenized")

        engine.manager.tokenizer.encode = encode  # type: ignore[method-assign]
        call = await post(engine.app, path, body)
    assert (call.status, call.error["param"], call.error["code"]) == (400, param, "context_length_exceeded")


@pytest.mark.parametrize(("size", "status"), [(63, 200), (64, 400), (65, 400)])
@pytest.mark.parametrize("path", [COMPLETIONS, "/generate"])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_fits_if_one_token_fits_behind_it(path: str, as_ids: bool, size: int, status: int) -> None:
    async with running() as engine:
        field = "prompt" if path == COMPLETIONS else "input_ids" if as_ids else "text"
        call = await post(engine.app, path, {field: [1] * size if as_ids else "x" * size})
    assert call.status == status
    if status == 400:
        assert (call.error["param"], call.error["code"]) == (field, "context_length_exceeded")


async def test_the_content_type_is_not_asked_for() -> None:
    async with running() as engine:
        call = await post(engine.app, CHAT, {"messages": HI}, headers={"content-type": "text/plain"})
    assert call.status == 200
