"""Log-probabilities as surfaces ask for them and show them: bounds, and the one name that a token has on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol, cast

import msgspec
from msgspec import Meta

from sterna.errors import InvalidRequest
from sterna.protocol.logprobs import TokenLogprobs
from sterna.text.token_names import TokenName, TokenNames

MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS_LOGPROB = 128

TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """`ids`. Raises InvalidRequest."""
    if len(ids) > MAX_TOKEN_IDS_LOGPROB:
        raise InvalidRequest(f"{param}: at most {MAX_TOKEN_IDS_LOGPROB} ids", param=param)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(f"{param}: ids must be in [0, {vocab_size})", param=param)
    return tuple(ids)


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


class JsonList:
    """A JSON array that grows at its end. What is added is encoded at once and never again, however long the array gets: an answer may have
    hundreds of numbers for each of thousands of tokens, and nobody else of the event loop may wait for all of them."""

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0
        """Bytes, brackets and the commas between parts aside."""

    def add(self, items: Sequence[object]) -> None:
        if items:
            part = msgspec.json.encode(items)[1:-1]
            self._parts.append(part)
            self.size += len(part)

    def clear(self) -> None:
        self._parts = []
        self.size = 0

    def as_list(self) -> list[Any]:
        """What stands in a struct's place for a list, and is encoded as that list."""
        self._parts = [b",".join(self._parts)] if self._parts else []
        return cast(list[Any], msgspec.Raw(b"[%b]" % b"".join(self._parts)))


class LogprobSink(Protocol):
    """A surface's way of showing the logprobs of one output, piece by piece."""

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Of the output's next tokens, `ids`."""
