"""Hop 2: `GenerateRequest` → one `GenerateReqInput` per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sterna.errors import InvalidRequest
from sterna.protocol.generate import CacheNamespace, GenerateReqInput
from sterna.protocol.logprobs import LogprobWish
from sterna.server.fields import member_rid, to_rid, to_session
from sterna.server.logprobs import check_token_ids
from sterna.server.native.generate.protocol import GenerateBody, GenerateRequest
from sterna.server.sampling import Lengths, SamplingResolver

DEFAULT_MAX_NEW_TOKENS = 128

T = TypeVar("T")


def to_rids(request: GenerateRequest) -> tuple[str, list[str]]:
    """The name of the whole, and one for each prompt. Raises InvalidRequest."""
    given = request.body.rid
    count = len(request.prompts)
    if isinstance(given, list):
        if len(given) != count:
            raise InvalidRequest(f"rid: {len(given)} for {count} prompts", param="rid")
        if len(set(given)) != count:
            raise InvalidRequest("rid: the same one twice", param="rid")
        rids = [to_rid(rid, "") for rid in given]
        return (rids[0] if count == 1 else to_rid(None, "gen-")), rids
    rid = to_rid(given, "gen-")
    return rid, [rid] if count == 1 else [member_rid(rid, index) for index in range(count)]


def to_wishes(body: GenerateBody, count: int, vocab_size: int) -> list[LogprobWish | None]:
    """One per prompt. A field that is no list of `count` is meant for every prompt. Raises InvalidRequest."""
    asked = _each(body.return_logprob, count, "return_logprob", absent=False)
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num", absent=0)
    ids = _token_ids(body.token_ids_logprob, count)
    wishes: list[LogprobWish | None] = []
    for wanted, top, token_ids in zip(asked, tops, ids, strict=True):
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


def to_generate(
    request: GenerateRequest,
    *,
    rids: list[str],
    received_time: float,
    sampling: SamplingResolver,
    wishes: Sequence[LogprobWish | None],
) -> list[GenerateReqInput]:
    """`wishes` for logprobs, one per prompt. Raises InvalidRequest."""
    result = []
    for index, (prompt, fields) in enumerate(zip(request.prompts, request.sampling_params, strict=True)):
        prefix = f"sampling_params[{index}]." if isinstance(request.body.sampling_params, list) else "sampling_params."
        lengths = Lengths(fields.max_new_tokens, fields.min_new_tokens or 0, fields.sampling_seed, "sampling_seed")
        result.append(
            GenerateReqInput(
                rid=rids[index],
                text=prompt if isinstance(prompt, str) else None,
                input_ids=None if isinstance(prompt, str) else prompt,
                sampling_params=sampling.resolve(fields, lengths, logprobs=wishes[index], prefix=prefix),
                default_max_new_tokens=DEFAULT_MAX_NEW_TOKENS,
                stream=bool(request.body.stream),
                priority=request.body.priority or 0,
                cache_namespace=CacheNamespace(salt=request.body.cache_salt or ""),
                session=to_session(request.body.session_params),
                received_time=received_time,
            )
        )
    return result
