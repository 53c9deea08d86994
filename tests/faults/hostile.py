"""Bodies that no client should send; each must get a 4xx that says why, at once, and change nothing."""

from __future__ import annotations

import json
import random
from typing import Any

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def _chat(model: str, **fields: Any) -> tuple[str, bytes]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
    return CHAT, json.dumps(body).encode()


def _completion(model: str, **fields: Any) -> tuple[str, bytes]:
    return COMPLETION, json.dumps({"model": model, "prompt": "hi", "max_tokens": 1} | fields).encode()


def _generate(**fields: Any) -> tuple[str, bytes]:
    return GENERATE, json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 1}} | fields).encode()


def hostile_requests(model: str) -> list[tuple[str, bytes]]:
    """(path, body)."""
    noise = random.Random(7).randbytes(300)
    return [
        (CHAT, b""),
        (CHAT, b"{"),
        (CHAT, b"null"),
        (CHAT, noise),
        (CHAT, b'{"model": "' + model.encode() + b'", "messages": ' + b"[" * 20_000),
        (CHAT, b'{"x": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}"),
        (COMPLETION, b'{"prompt": "\\ud800", "max_tokens": 1}'),
        (GENERATE, b'{"text": "hi", "sampling_params": {"max_new_tokens": 1' + b"0" * 5000 + b"}}"),
        ("/v1/no/such/route", b"{}"),
        _chat("no-such-model"),
        _chat(model, messages=[]),
        _chat(model, messages="hi"),
        _chat(model, messages=[{"role": "user", "content": [{"type": "hologram", "hologram": "x"}]}]),
        _chat(model, max_tokens=-1),
        _chat(model, max_tokens=10**12),
        _chat(model, temperature=1e6),
        _chat(model, top_p=0),
        _chat(model, n=5_000_000),
        _chat(model, stop=[str(index) for index in range(100_000)]),
        _chat(model, logit_bias={str(index): 1 for index in range(100_000)}),
        _chat(model, logit_bias={"99999999": 1}),
        _completion(model, prompt=[]),
        _completion(model, prompt=[[]]),
        _completion(model, prompt=[1, "two"]),
        _completion(model, prompt=[-1]),
        _completion(model, prompt=[10**9]),
        _completion(model, prompt="word " * 40_000),
        _completion(model, max_tokens="5"),
        _generate(text=None),
        _generate(input_ids=[1]),
        _generate(rid=["a", "a"], text=["x", "y"]),
        _generate(sampling_params={"stop_token_ids": [None]}),
        _generate(sampling_params=[{}, {}]),
        _generate(sampling_params={"min_new_tokens": 9, "max_new_tokens": 1}),
        ("/abort_request", b'{"rid": 5}'),
        ("/tokenize", b'{"prompt": 5}'),
    ]
