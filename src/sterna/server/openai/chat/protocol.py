"""Hop 1: the body of POST /v1/chat/completions, and the types of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sterna.errors import InvalidRequest, UnsupportedField
from sterna.server.body import BodyDecoder, UnknownFields, parse
from sterna.server.fields import SGLANG_UNBUILT
from sterna.server.logprobs import TopLogprobs
from sterna.server.openai.fields import OPENAI_UNBUILT, VLLM_UNBUILT, OpenAIFields, Usage
from sterna.server.sampling import PositiveCount

MAX_MESSAGES = 16_384
# Parts that OpenAI defines and that need a model with eyes or ears.
MEDIA_PARTS = frozenset({"image_url", "input_audio", "audio_url", "video_url", "file", "image", "audio", "video"})


class ContentPart(msgspec.Struct):
    type: str
    """`text`; other kinds are refused until there are models for them."""
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One turn. Further fields are kept: the model's template may read them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Null only where an assistant's turn has no text."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionBody(OpenAIFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: PositiveCount | None = None
    """The same as `max_tokens`; default: the rest of the context."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn (default true, unless the last message is continued)."""
    continue_final_message: bool | None = None
    """Go on writing the last message instead of opening a turn."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's template."""
    logprobs: bool | None = None
    """Whether each output token comes with its log-probability."""
    top_logprobs: TopLogprobs | None = None
    """How many of the likeliest tokens' come with it; more than 0 needs `logprobs`."""


@dataclass(slots=True, frozen=True)
class ChatCompletionRequest:
    """A decoded body."""

    body: ChatCompletionBody
    messages: list[dict[str, Any]]
    """`body.messages` as sent, with the fields that only templates know."""


UNBUILT = {
    **VLLM_UNBUILT,
    **SGLANG_UNBUILT,
    **OPENAI_UNBUILT,
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # without tools neither changes anything
    "prediction": (),
    "reasoning_effort": (),
    "reasoning": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "task": (),
}

_decoder = BodyDecoder(ChatCompletionBody, unbuilt=UNBUILT)
_messages = msgspec.json.Decoder(list[dict[str, Any]])


def decode(body: bytes, unknown: UnknownFields) -> ChatCompletionRequest:
    """HTTP body → request. Raises InvalidRequest or UnsupportedField that name the field."""
    request, fields = _decoder.decode(body, unknown)
    if not request.messages:
        raise InvalidRequest("messages: at least one is needed", param="messages")
    if len(request.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: at most {MAX_MESSAGES}", param="messages")
    for index, message in enumerate(request.messages):
        _check_content(message, f"messages[{index}].content")
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest("add_generation_prompt: a continued message opens no turn; send one of the two", param="add_generation_prompt")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: only with `logprobs: true`", param="top_logprobs")
    return ChatCompletionRequest(request, parse(_messages, fields["messages"], prefix="messages"))


def _check_content(message: ChatMessage, param: str) -> None:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{param}: only an assistant's may be null", param=param)
    elif not isinstance(content, str):
        for index, part in enumerate(content):
            if part.type in MEDIA_PARTS:
                param = f"{param}[{index}].type"
                raise UnsupportedField(f"{param}: this server takes text parts only, not {part.type}", param=param)
            if part.type != "text":
                param = f"{param}[{index}].type"
                raise InvalidRequest(f"{param}: no such kind of part", param=param)
            if part.text is None:
                param = f"{param}[{index}].text"
                raise InvalidRequest(f"{param}: this field is required", param=param, code="missing_required_parameter")


class ChatResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One output token."""

    token: str
    """Its text; bytes that are no UTF-8 by themselves are escaped."""
    logprob: float
    bytes: tuple[int, ...]
    """Joined they are the content, stop strings included."""
    top_logprobs: list[TopLogprob]
    """The likeliest tokens in its place, likeliest first."""


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    matched_stop: str | int | None
    """The stop string or end token that ended the output."""


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
