"""Log-probabilities as `/generate` asks for them (hop 2) and shows them (hop 9): SGLang's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, TypeVar

from sterna.errors import InvalidRequest
from sterna.protocol.logprobs import TokenLogprobs
from sterna.server.logprobs import MAX_TOP_LOGPROBS, LogprobWish, Spelling, check_token_ids
from sterna.server.native.generate.protocol import GenerateBody, LogprobRow

T = TypeVar("T")


class LogprobFields(TypedDict, total=False):
    """Of `MetaInfo`."""

    input_token_logprobs: list[LogprobRow]
    output_token_logprobs: list[LogprobRow]
    output_top_logprobs: list[list[LogprobRow]]
    output_token_ids_logprobs: list[list[LogprobRow]]


def to_wishes(body: GenerateBody, count: int, vocab_size: int) -> list[LogprobWish | None]:
    """One per prompt. A field that is no list of `count` is meant for every prompt. Raises InvalidRequest."""
    asked = _each(body.return_logprob, count, "return_logprob", absent=False)
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num", absent=0)
    ids = _token_ids(body.token_ids_logprob, count)
    wishes: list[LogprobWish | None] = []
    for wanted, top, token_ids in zip(asked, tops, ids, strict=True):
        if top > MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs_num: at most {MAX_TOP_LOGPROBS}", param="top_logprobs_num")
        check_token_ids(token_ids, vocab_size, "token_ids_logprob")
        if not wanted and (top or token_ids):
            param = "top_logprobs_num" if top else "token_ids_logprob"
            raise InvalidRequest(f"{param}: only with `return_logprob: true`", param=param)
        wishes.append(LogprobWish(top, tuple(token_ids)) if wanted else None)
    return wishes


def _each(given: T | list[T] | None, count: int, param: str, *, absent: T) -> list[T]:
    if not isinstance(given, list):
        return [absent if given is None else given] * count
    if len(given) != count:
        raise InvalidRequest(f"{param}: {len(given)} for {count} prompts", param=param)
    return given


def _token_ids(given: list[int | list[int]] | None, count: int) -> list[list[int]]:
    param = "token_ids_logprob"
    if not given:
        return [[]] * count
    if len(set(map(type, given))) > 1:
        raise InvalidRequest(f"{param}: a list holds token ids, or lists of token ids", param=param)
    if isinstance(given[0], int):
        return [given] * count  # type: ignore[list-item]
    return _each(given, count, param, absent=[])  # type: ignore[arg-type]


class LogprobRows:
    """The rows of one prompt's output, for its `meta_info`."""

    def __init__(self, wish: LogprobWish, spelling: Spelling | None) -> None:
        """Rows hold texts where there is a `spelling`."""
        self._wish = wish
        self._spelling = spelling
        self.clear()

    def clear(self) -> None:
        """Forget the rows so far."""
        self._chosen: list[LogprobRow] = []
        self._top: list[list[LogprobRow]] = []
        self._of_ids: list[list[LogprobRow]] = []

    def take(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens, `ids`."""
        row, wish = self._row, self._wish
        for token_id, each in zip(ids, logprobs, strict=True):
            self._chosen.append(row(each.chosen, token_id))
            if wish.top:
                self._top.append(list(map(row, each.top, each.top_ids)))
            if wish.token_ids:
                self._of_ids.append(list(map(row, each.of_ids, wish.token_ids)))

    def fields(self) -> LogprobFields:
        fields = LogprobFields(input_token_logprobs=[], output_token_logprobs=self._chosen)
        if self._wish.top:
            fields["output_top_logprobs"] = self._top
        if self._wish.token_ids:
            fields["output_token_ids_logprobs"] = self._of_ids
        return fields

    def _row(self, logprob: float, token_id: int) -> LogprobRow:
        return logprob, token_id, None if self._spelling is None else self._spelling.name(token_id).text
