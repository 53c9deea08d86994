"""Hop 4: `TokenizedGenerateReqInput` → `Req`. The server has validated all of it; what could harm the scheduler is checked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sterna.errors import ContextLengthExceeded, InvalidRequest
from sterna.protocol.finish import FinishAbort, to_finish
from sterna.protocol.generate import TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.finish import DOES_NOT_FIT
from sterna.scheduler.req import Req
from sterna.scheduler.stops import TextStops, special_token_id
from sterna.text.tokenizer import Tokenizer

UNSTREAMED_OUTPUT_INTERVAL = 64
"""Tokens between two rows of a request that nobody watches."""


class Refusal(Exception):
    """The request can't be taken; `reason` is its terminal answer."""

    def __init__(self, reason: FinishAbort) -> None:
        super().__init__(reason.message)
        self.reason = reason


@dataclass(slots=True, frozen=True)
class IntakeLimits:
    vocab_size: int
    context_len: int
    pool_tokens: int
    """Of the longest request that the KV pools could hold."""
    stream_interval: int


def to_req(obj: TokenizedGenerateReqInput, serial: int, received: float, limits: IntakeLimits, tokenizer: Callable[[], Tokenizer]) -> Req:
    """`tokenizer` is called for requests with text stops only. Raises Refusal."""
    params = obj.sampling_params
    prompt = _checked_ids(obj.input_ids, limits.vocab_size)
    max_new_tokens = params.max_new_tokens
    if max_new_tokens is None or max_new_tokens <= len(obj.resume_output_ids):
        raise Refusal(to_finish(InvalidRequest("max_new_tokens is not set", param="max_tokens")))
    if obj.resume_output_ids:
        _checked_ids(obj.resume_output_ids, limits.vocab_size)
    if len(prompt) + max_new_tokens > limits.context_len:
        message = f"{len(prompt)} prompt tokens and {max_new_tokens} more don't fit the context of {limits.context_len}"
        raise Refusal(to_finish(ContextLengthExceeded(message, param="max_tokens")))
    if len(prompt) + len(obj.resume_output_ids) > limits.pool_tokens:
        raise Refusal(DOES_NOT_FIT)
    return Req(
        rid=obj.rid,
        serial=serial,
        prompt_ids=prompt,
        output_ids=list(obj.resume_output_ids),
        sampling_params=params,
        max_new_tokens=max_new_tokens,
        output_interval=limits.stream_interval if obj.stream else max(limits.stream_interval, UNSTREAMED_OUTPUT_INTERVAL),
        reply_to=obj.reply_to,
        cache_namespace=obj.cache_namespace,
        received_time=received,
        num_resumed=len(obj.resume_output_ids),
        resume_chars=obj.resume_chars,
        token_stops=_token_stops(params, tokenizer),
        text_stops=_text_stops(obj, tokenizer),
        priority=obj.priority,
        arrival_time=obj.received_time or received,
        num_sent=len(obj.resume_output_ids),
    )


def _checked_ids(ids: list[int], vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if not ids or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Refusal(to_finish(InvalidRequest(f"there must be token ids, all in [0, {vocab_size})", param="input_ids")))
    return np.array(ids, dtype=np.int32)


def _token_stops(params: SamplingParams, tokenizer: Callable[[], Tokenizer]) -> frozenset[int]:
    """Its stop ids, and the ids of stop strings that are exactly one special token: such a token may leave no text to be found in."""
    ids = set(params.stop_token_ids)
    if params.stop:
        ids.update(token for stop in params.stop if (token := special_token_id(tokenizer(), stop)) is not None)
    return frozenset(ids)


def _text_stops(obj: TokenizedGenerateReqInput, tokenizer: Callable[[], Tokenizer]) -> TextStops | None:
    params = obj.sampling_params
    if not params.stop:
        return None
    return TextStops(tokenizer(), obj.input_ids, obj.resume_output_ids, params)
