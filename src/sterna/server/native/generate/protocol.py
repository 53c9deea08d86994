"""Hop 1: the body of POST /generate (SGLang's own API), and the types of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sterna.errors import InvalidRequest
from sterna.server.body import BodyDecoder, UnknownFields, parse
from sterna.server.fields import SGLANG_UNBUILT, CacheSalt, SessionParams, User
from sterna.server.logprobs import TopLogprobs
from sterna.server.sampling import Count, PositiveCount, SamplingFields, Seed
from sterna.server.terms import Priority, Timeout

MAX_PROMPTS = 1024


class GenerateSamplingParams(SamplingFields, kw_only=True):
    max_new_tokens: PositiveCount | None = None
    """Default 128."""
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Exactly one of `text` and `input_ids`; lists make a batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    # One object, or one per prompt: msgspec can't say so of two structs, so `decode` types them.
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    """`GenerateSamplingParams`, or a list of them, one per prompt."""
    rid: str | list[str] | None = None
    stream: bool | None = None
    incremental: bool | None = None
    """Events carry deltas instead of the text so far (default: `--incremental-streaming-output`)."""
    user: User | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: CacheSalt | None = None
    session_params: SessionParams | None = None
    """All prompts of a list go on from the same place."""
    return_logprob: bool | list[bool] | None = None
    """Whether each output token comes with its log-probability (in `meta_info`); a list says it of each prompt, as in the fields below."""
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    """How many of the likeliest tokens' come with it, at most 20."""
    token_ids_logprob: list[int | list[int]] | None = None
    """Tokens, at most 128, whose log-probabilities come with it."""
    return_text_in_logprobs: bool | None = None
    """Whether the rows hold the tokens' texts."""


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """A decoded body."""

    body: GenerateBody
    prompts: list[str | list[int]]
    is_list: bool
    """Whether the answer is a list too."""
    sampling_params: list[GenerateSamplingParams]
    """One per prompt."""


UNBUILT: dict[str, tuple[Any, ...]] = {
    **SGLANG_UNBUILT,
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "logprob_start_len": (-1,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "background": (False,),
    "conversation_id": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "no_logs": (False,),
    "validation_time": (),
    "external_trace_header": (),
    "http_worker_ipc": (),
    "need_wait_for_image": (False,),
    "num_items_assigned": (),
}
SAMPLING_UNBUILT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "custom_params": (),
    "stream_interval": (),
    "beam_width": (),
}

_decoder = BodyDecoder(GenerateBody, unbuilt=UNBUILT)
_sampling = BodyDecoder(GenerateSamplingParams, unbuilt=SAMPLING_UNBUILT)
_many = msgspec.json.Decoder(list[msgspec.Raw])


def decode(body: bytes, unknown: UnknownFields) -> GenerateRequest:
    """HTTP body → request. Raises InvalidRequest or UnsupportedField that name the field."""
    request, fields = _decoder.decode(body, unknown)
    prompts, is_list = _to_prompts(request)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts", param="text" if request.text is not None else "input_ids")
    return GenerateRequest(request, prompts, is_list, _to_sampling(fields.get("sampling_params"), len(prompts), unknown))


def _to_prompts(request: GenerateBody) -> tuple[list[str | list[int]], bool]:
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("exactly one of text and input_ids is needed", param="text")
    if isinstance(request.text, str):
        return [request.text], False
    given: list[Any] = request.input_ids if request.text is None else request.text  # type: ignore[assignment]
    param = "input_ids" if request.text is None else "text"
    if not given:
        raise InvalidRequest(f"{param}: an empty list", param=param)
    if len(set(map(type, given))) > 1:
        raise InvalidRequest(f"{param}: a list holds token ids, or lists of token ids", param=param)
    if isinstance(given[0], int):
        return [given], False
    return given, True


def _to_sampling(raw: msgspec.Raw | None, count: int, unknown: UnknownFields) -> list[GenerateSamplingParams]:
    if raw is None or bytes(raw) == b"null":
        return [GenerateSamplingParams()] * count
    if not bytes(raw).startswith(b"["):
        return [_one_sampling(raw, "sampling_params", unknown)] * count
    each = parse(_many, raw, prefix="sampling_params")
    if len(each) != count:
        raise InvalidRequest(f"sampling_params: {len(each)} for {count} prompts", param="sampling_params")
    return [_one_sampling(one, f"sampling_params[{index}]", unknown) for index, one in enumerate(each)]


def _one_sampling(raw: msgspec.Raw, prefix: str, unknown: UnknownFields) -> GenerateSamplingParams:
    params, _ = _sampling.decode(raw, unknown, prefix=prefix)
    return params


LogprobRow = tuple[float, int, str | None]
"""Log-probability, token id, and its text where `return_text_in_logprobs` asks; bytes that are no UTF-8 by themselves are escaped."""


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: dict[str, str | int] | None
    """`{"type": "stop", "matched": …}`, `{"type": "length", "length": …}` or `{"type": "abort", "message": …}`; null until the end."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    """Seconds from the request's arrival to its last token."""
    # What `return_logprob` adds: lists with one entry per output token.
    # Those of the input are empty: of prompts there are none. SGLang's clients look for them.
    input_token_logprobs: list[LogprobRow] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[LogprobRow] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[LogprobRow]] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[LogprobRow]] | msgspec.UnsetType = msgspec.UNSET
    """With `top_logprobs_num`: the likeliest tokens, likeliest first."""
    input_token_ids_logprobs: list[list[LogprobRow]] | msgspec.UnsetType = msgspec.UNSET
    output_token_ids_logprobs: list[list[LogprobRow]] | msgspec.UnsetType = msgspec.UNSET
    """With `token_ids_logprob`: those tokens, in its order."""


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None
