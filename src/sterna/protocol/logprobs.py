"""Log-probabilities of output tokens, as they travel from the executor to the server."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one output token of a request with `SamplingParams.return_logprob`.

    Each is the log softmax of the model's own logits, before penalties, bias, grammar, temperature and filters; finite: where a probability
    is 0 it is the lowest float32.
    """

    chosen: float
    """Of the token itself."""
    top_ids: list[int] = []
    """The `top_logprobs_num` likeliest tokens, likeliest first, the lowest id first among equals; fewer where no others are possible."""
    top: list[float] = []
    """Of each of `top_ids`."""
    of_ids: list[float] = []
    """Of each of `SamplingParams.token_ids_logprob`."""
