"""Whether a request ends with the token that it just got. The order: no valid token, stop string, end token, length."""

from __future__ import annotations

from sterna.errors import EngineFailure, InvalidLogits
from sterna.protocol.finish import ENGINE_CRASHED, FAULT, FinishLength, FinishMatchedToken, FinishReason, to_finish
from sterna.scheduler.req import Req

INVALID_LOGITS = to_finish(InvalidLogits("the model gave no valid token"))
SUSPECT = (INVALID_LOGITS, FAULT, ENGINE_CRASHED)
"""Endings after which nobody knows what the request's slots hold: its KV serves nobody."""
DOES_NOT_FIT = to_finish(EngineFailure("the request does not fit in the KV memory, even alone"))


def check_finished(req: Req, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Judge `req.output_ids[-1]`, a token of the vocabulary. Must see every token of a request that has text stops."""
    count = len(req.output_ids)
    token = req.output_ids[-1]
    params = req.sampling_params
    held_off = count < params.min_new_tokens
    text_stops = req.text_stops
    if text_stops is not None and (match := text_stops.push(token, count - 1, held_off=held_off)) is not None:
        return match
    reason: FinishReason | None = None if held_off else _end_token(req, token, eos_token_ids)
    if reason is None and count >= req.max_new_tokens:
        reason = FinishLength(count)
    if reason is not None and text_stops is not None and not held_off:
        return text_stops.finish(count - 1) or reason
    return reason


def _end_token(req: Req, token: int, eos_token_ids: frozenset[int]) -> FinishMatchedToken | None:
    if token in req.token_stops:
        return FinishMatchedToken(token, token in eos_token_ids)
    if token in eos_token_ids and not req.sampling_params.ignore_eos:
        return FinishMatchedToken(token, True)
    return None


def needs_every_token(req: Req) -> bool:
    """Whether each token must be looked at, not only the model's end tokens and the last one: for its stops, or for its logprobs."""
    return req.text_stops is not None or bool(req.token_stops) or req.sampling_params.return_logprob
