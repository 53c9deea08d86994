"""Log-probabilities of output tokens: what is asked for, and what travels from the executor to the server."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class LogprobWish(NamedTuple):
    """What a request wants to know of each of its output tokens, besides the token's own logprob."""

    top: int = 0
    """How many of the likeliest tokens'."""
    token_ids: tuple[int, ...] = ()
    """Of which tokens."""


LEAST_LOGPROB = -9999.0
"""Stands for less, and for a probability of 0. JSON has no infinity; this is OpenAI's word for a token that is very unlikely."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one output token of a request with `SamplingParams.return_logprob`.

    Each is the log softmax of the model's own logits, before penalties, bias, grammar, temperature and filters, and no less than
    `LEAST_LOGPROB`.
    Lists are packed, as int32 or float32 of this machine: a journal may hold thousands of these, and each crosses two sockets.
    """

    chosen: float
    """Of the token itself."""
    packed_top_ids: bytes = b""
    packed_top: bytes = b""
    packed_of_ids: bytes = b""

    @staticmethod
    def pack(chosen: float, top_ids: Iterable[int] = (), top: Iterable[float] = (), of_ids: Iterable[float] = ()) -> TokenLogprobs:
        """From what the properties of these names return."""
        return TokenLogprobs(chosen, array("i", top_ids).tobytes(), array("f", top).tobytes(), array("f", of_ids).tobytes())

    @property
    def top_ids(self) -> list[int]:
        """The `top_logprobs_num` likeliest tokens, likeliest first, among equals the lowest id first; fewer where no others can come."""
        return array("i", self.packed_top_ids).tolist()

    @property
    def top(self) -> list[float]:
        """Of each of `top_ids`."""
        return array("f", self.packed_top).tolist()

    @property
    def of_ids(self) -> list[float]:
        """Of each of `SamplingParams.token_ids_logprob`."""
        return array("f", self.packed_of_ids).tolist()
