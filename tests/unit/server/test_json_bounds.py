"""No accepted body holds the event loop for long: what is expensive to decode is counted before it is decoded."""

import pytest

from sterna.errors import InvalidRequest
from sterna.server.json_bounds import MAX_CONTAINERS, MAX_FIELDS, MAX_KEYS, MAX_VALUES, check_bounds
from unit.server.asgi import get, post
from unit.server.engine import running

OPENING = b'{"prompt":"hi","max_tokens":1,"x":['


def many(piece: bytes, count: int) -> bytes:
    return OPENING + b",".join([piece] * count) + b"]}"


# What a review held a server up with, and more of the kind.
TOO_MUCH = {
    "arrays": (many(b"[]", 1_000_000), "arrays and objects"),
    "objects": (many(b'{"a":1}', 100_000), "arrays and objects"),
    "fields": (b'{"prompt":"hi",' + b",".join(b'"x%d":1' % i for i in range(MAX_KEYS)) + b"}", "object fields"),
    "bias": (b'{"prompt":"hi","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(MAX_KEYS)) + b"}}", "object fields"),
    "ids": (b'{"prompt":[' + b"1," * 3_000_000 + b"1]}", "values"),
    "strings": (many(b'""', 3_000_000), "strings"),
    "behind a text": (b'{"prompt":"[{,:\\"\\\\","x":[' + b"[]," * 100_000 + b"1]}", "arrays and objects"),
    "not json": (b"[" * 100_000, "arrays and objects"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"])
async def test_a_body_that_takes_long_to_decode_is_refused_undecoded(path: str, name: str) -> None:
    body, what = TOO_MUCH[name]
    async with running() as engine:
        call = await post(engine.app, path, body)
        assert (call.status, call.error["code"]) == (400, "body_too_complex")
        assert what in call.error["message"]
        assert (await get(engine.app, "/health")).status == 200


async def test_unknown_fields_have_a_bound_of_their_own() -> None:
    async with running() as engine:
        body = {"prompt": "hi"} | {f"x{i}": 1 for i in range(MAX_FIELDS)}
        call = await post(engine.app, "/v1/completions", body)
    assert (call.status, call.error["code"]) == (400, "body_too_complex")
    assert f"{MAX_FIELDS} fields" in call.error["message"]


HONEST = {
    "a million ids": b'{"prompt": [' + b"123456, " * 1_000_000 + b"1]}",
    "ten thousand messages": b'{"messages": ['
    + b", ".join([b'{"role": "user", "content": "What, [exactly]: is {this}?"}'] * 10_000)
    + b"]}",
    "source code as text": b'{"prompt": "' + b"f({\\\"a\\\": [1, 2, [3]]}, '\\\\');\\n" * 400_000 + b'"}',
    "a text that ends in backslashes": b'{"prompt": "' + b"[" * 100_000 + b'\\\\\\\\"}',
    "at the bound": many(b"[]", MAX_CONTAINERS - 2),
}


@pytest.mark.parametrize("name", HONEST)
def test_large_honest_bodies_pass(name: str) -> None:
    check_bounds(HONEST[name])


def test_one_more_than_the_bound_does_not_pass() -> None:
    with pytest.raises(InvalidRequest):
        check_bounds(many(b"[]", MAX_CONTAINERS - 1))
    check_bounds(many(b"1", MAX_VALUES - 1))
    with pytest.raises(InvalidRequest):
        check_bounds(many(b"1", MAX_VALUES))


async def test_a_prompt_of_a_million_ids_reaches_the_engine() -> None:
    async with running(context_len=1_100_000) as engine:
        call = await post(engine.app, "/v1/completions", b'{"prompt": [' + b"1, " * 1_000_000 + b"1]}")
        assert call.status == 200
        assert call.json["usage"]["prompt_tokens"] == 1_000_001
