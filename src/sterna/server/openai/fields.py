"""Types and rules that OpenAI's surfaces share."""

from __future__ import annotations

from typing import Any

import msgspec

from sterna.errors import InvalidRequest
from sterna.protocol.finish import FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.server.fields import CacheSalt, SessionParams, User
from sterna.server.sampling import Count, Lengths, PositiveCount, SamplingFields, Seed
from sterna.server.terms import Priority, Timeout
from sterna.tokenizer_manager.req_state import JournalReader


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk at the end, with `usage` and without choices."""
    continuous_usage_stats: bool | None = None
    """`usage` so far in every chunk that has choices."""
    include_obfuscation: bool | None = None
    """Sterna pads nothing: true is refused."""


class OpenAIFields(SamplingFields, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    """The served model's name; absent is the same."""
    max_tokens: PositiveCount | None = None
    min_tokens: Count | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: User | None = None
    """Appears in the request's log line."""
    safety_identifier: User | None = None
    """Stands in for `user` where that is absent."""
    rid: str | None = None
    """The request's name for /abort_request and in responses; unique while it lives."""
    priority: Priority | None = None
    timeout: Timeout | None = None
    cache_salt: CacheSalt | None = None
    """Prefixes are shared only between requests of the same salt."""
    session_params: SessionParams | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(readers: list[JournalReader]) -> Usage:
    """Tokens of all members together, as of their last deltas."""
    prompt = sum(reader.prompt_tokens for reader in readers)
    completion = sum(reader.completion_tokens for reader in readers)
    cached = sum(reader.cached_tokens for reader in readers)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def matched_stop(reason: FinishReason | None) -> str | int | None:
    """SGLang's `matched_stop`: the stop string or end token that ended the output."""
    return reason.matched if isinstance(reason, FinishMatchedStr | FinishMatchedToken) else None


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """The options, or their defaults. Raises InvalidRequest."""
    if options is None:
        return StreamOptions()
    if not stream:
        raise InvalidRequest("stream_options: only a stream (`stream: true`) has them", param="stream_options")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported", param=param, code="unsupported_parameter")
    return options


def lengths(fields: OpenAIFields, max_tokens: int | None) -> Lengths:
    return Lengths(max_tokens, fields.min_tokens or 0, fields.seed)


# ---- fields that aren't built: name -> values that change nothing (see `server/body.py`) ----

OPENAI_UNBUILT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prompt_cache_key": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": (),
    "moderation": (),
}

VLLM_UNBUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "include_stop_str_in_output": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "mm_processor_kwargs": (),
    "request_id": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
}
