"""`SamplingParams` as the native sampler takes them, and logprobs as it gives them."""

from __future__ import annotations

from sterna.executor.native._native import SamplingOptions
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams

_INT32_MAX = 2**31 - 1

RowLogprobs = tuple[float, bytes, bytes, bytes]
"""`TokenLogprobs` as the engine gives them: the fields in their order."""


def to_options(params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> SamplingOptions:
    """By the rules of `executor/torch/sampler_state.py`: `min_new_tokens` hold back stop tokens and, unless ignored, the model's own ends.

    End tokens that the model has no row for, which some files name, are passed over. Other ids are checked where the row is bound.
    """
    options = SamplingOptions()
    options.temperature = params.temperature
    options.top_k = min(params.top_k, vocab_size)
    options.top_p = params.top_p
    options.min_p = params.min_p
    options.repetition = params.repetition_penalty
    options.presence = params.presence_penalty
    options.frequency = params.frequency_penalty
    options.seed = params.seed
    options.min_new_tokens = min(params.min_new_tokens, _INT32_MAX)
    options.bias_ids = list(params.logit_bias.keys())
    options.bias_values = list(params.logit_bias.values())
    if params.min_new_tokens > 0:
        own = () if params.ignore_eos else tuple(token for token in eos_token_ids if token < vocab_size)
        options.end_ids = sorted({*params.stop_token_ids, *own})
    if params.return_logprob:
        options.top_logprobs = min(params.top_logprobs_num, vocab_size)
        options.logprob_ids = list(params.token_ids_logprob)
    return options


def to_logprobs(rows: list[RowLogprobs | None]) -> list[TokenLogprobs | None]:
    return [None if row is None else TokenLogprobs(*row) for row in rows]
