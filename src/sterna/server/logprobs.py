"""Log-probabilities as surfaces ask for them and show them: bounds, and the one name that a token has on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from sterna.errors import InvalidRequest
from sterna.protocol.logprobs import TokenLogprobs
from sterna.text.token_names import TokenName, TokenNames

MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS_LOGPROB = 128

TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest."""
    if len(ids) > MAX_TOKEN_IDS_LOGPROB:
        raise InvalidRequest(f"{param}: at most {MAX_TOKEN_IDS_LOGPROB} ids", param=param)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"{param}: ids must be in [0, {vocab_size})", param=param)


class Spelling:
    """The names of tokens as one request sees them."""

    __slots__ = ("_names", "_skip")

    def __init__(self, names: TokenNames, skip_special_tokens: bool | None) -> None:
        """`skip_special_tokens` as the request has it: absent is true."""
        self._names = names
        self._skip = skip_special_tokens is not False

    def name(self, token_id: int) -> TokenName:
        return self._names.name(token_id, skip_special_tokens=self._skip)

    def top(self, logprobs: TokenLogprobs) -> Iterator[tuple[TokenName, float]]:
        """The likeliest tokens, likeliest first, and their logprobs."""
        return zip(map(self.name, logprobs.top_ids), logprobs.top, strict=True)
