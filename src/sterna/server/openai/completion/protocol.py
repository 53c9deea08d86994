"""Hop 1: the body of POST /v1/completions, and the types of its answers."""

from __future__ import annotations

from typing import cast

import msgspec

from sterna.errors import InvalidRequest
from sterna.server.body import BodyDecoder, UnknownFields
from sterna.server.fields import SGLANG_UNBUILT
from sterna.server.logprobs import TopLogprobs
from sterna.server.openai.fields import OPENAI_UNBUILT, VLLM_UNBUILT, OpenAIFields, Usage

MAX_PROMPTS = 1024


class CompletionRequest(OpenAIFields, kw_only=True):
    # msgspec takes one array type per union; `decode` sees to it that a list holds one kind.
    prompt: str | list[str | int | list[int]]
    """A text, its token ids, or a list of either (at most 1024)."""
    logprobs: TopLogprobs | None = None
    """Each output token comes with its log-probability, and with those of so many of the likeliest."""


UNBUILT = {
    **VLLM_UNBUILT,
    **SGLANG_UNBUILT,
    **OPENAI_UNBUILT,
    "best_of": (1,),
    "echo": (False,),
    "max_completion_tokens": (),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}

_decoder = BodyDecoder(CompletionRequest, unbuilt=UNBUILT)


def decode(body: bytes, unknown: UnknownFields) -> CompletionRequest:
    """HTTP body → request. Raises InvalidRequest or UnsupportedField that name the field."""
    request, _ = _decoder.decode(body, unknown)
    to_prompts(request.prompt)
    return request


def to_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt` as one list of prompts. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: an empty list", param="prompt")
    kinds = set(map(type, prompt))  # at C's speed: the list may hold millions of ids
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(kinds) > 1:
        raise InvalidRequest("prompt: a list holds texts, or token ids, or lists of token ids", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts", param="prompt")
    return cast(list[str | list[int]], prompt)


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per output token."""

    text_offset: list[int]
    """Where the token's text begins, in characters of `text`."""
    token_logprobs: list[float]
    tokens: list[str]
    """Texts; bytes that are no UTF-8 by themselves are escaped."""
    top_logprobs: list[dict[str, float]]
    """The token's own, and those of the likeliest tokens in its place. Where several have one text it is the token's own, else the
    likeliest one's."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    matched_stop: str | int | None
    """The stop string or end token that ended the output."""


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChoice]
    """One per prompt, in their order."""
    usage: Usage
