"""Hop 2: `ChatCompletionRequest` → `GenerateReqInput`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from sterna.errors import InvalidRequest
from sterna.protocol.generate import CacheNamespace, GenerateReqInput
from sterna.protocol.logprobs import LogprobWish
from sterna.server.fields import to_session
from sterna.server.openai.chat.protocol import ChatCompletionRequest
from sterna.server.openai.fields import lengths
from sterna.server.sampling import SamplingResolver
from sterna.text.chat_template import ChatTemplate
from sterna.text.chat_turn import render_turn

# What rendering passes to the template itself.
RESERVED_KWARGS = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"})


def to_generate(
    request: ChatCompletionRequest, *, rid: str, received_time: float, template: ChatTemplate | None, sampling: SamplingResolver
) -> GenerateReqInput:
    """Render the template, merge the stops, validate the sampling parameters, draw the seed. A template may be slow: call it off the loop.

    Where a session goes on, `messages` are the new turn's, and the text is what follows the answer before them.
    Raises InvalidRequest, also for a template that raises.
    """
    body = request.body
    if template is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
    max_tokens = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    logprobs = LogprobWish(body.top_logprobs or 0) if body.logprobs else None
    params = sampling.resolve(body, lengths(body, max_tokens), logprobs=logprobs)
    continued = bool(body.continue_final_message)
    session = to_session(body.session_params, chat=True)
    messages = [_to_template(message) for message in request.messages]
    render = partial(render_turn, template) if session is not None and session.closes_answer else template.render
    text = render(
        messages,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        tools=None,
        **_template_kwargs(body.chat_template_kwargs),
    )
    return GenerateReqInput(
        rid=rid,
        text=text,
        add_special_tokens=False,
        sampling_params=params,
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_namespace=CacheNamespace(salt=body.cache_salt or ""),
        session=session,
        received_time=received_time,
        templated_time=time.monotonic(),
    )


def _to_template(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `developer` is what templates know as `system`; an assistant's null is empty."""
    if message["role"] == "developer":
        message = {**message, "role": "system"}
    if message.get("content") is None:
        message = {**message, "content": ""}
    return message


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    for name in kwargs or {}:
        if name in RESERVED_KWARGS or name.startswith("_") or not name.isidentifier():
            param = "chat_template_kwargs"
            raise InvalidRequest(f"{param}: {name[:64]!r} can't be set here", param=param)
    return kwargs or {}
