"""Hop 2: `GenerateRequest` → one `GenerateReqInput` per prompt."""

from __future__ import annotations

from typing import TypeVar, cast

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
    """One per prompt. A field that is no list of `count` is meant for every prompt that asks for logprobs. Raises InvalidRequest."""
    asked = _each(body.return_logprob, count, "return_logprob", absent=False)
    tops = _each_asked(body.top_logprobs_num, asked, "top_logprobs_num", absent=0)
    ids = _each_asked(_to_token_ids(body.token_ids_logprob, vocab_size), asked, "token_ids_logprob", absent=())
    return [LogprobWish(top, token_ids) if wanted else None for wanted, top, token_ids in zip(asked, tops, ids, strict=True)]


def _each(given: T | list[T] | None, count: int, param: str, *, absent: T) -> list[T]:
    if not isinstance(given, list):
        return [absent if given is None else given] * count
    if len(given) != count:
        raise InvalidRequest(f"{param}: {len(given)} for {count} prompts", param=param)
    return given


def _each_asked(given: T | list[T] | None, asked: list[bool], param: str, *, absent: T) -> list[T]:
    """What is said of a prompt that asks for no logprobs is refused, and so is what is said of all where none does."""
    each = _each(given, len(asked), param, absent=absent)
    said_of_each = isinstance(given, list)
    if any(value and not wanted and (said_of_each or not any(asked)) for value, wanted in zip(each, asked, strict=True)):
        raise InvalidRequest(f"{param}: only with `return_logprob: true`", param=param)
    return each


def _to_token_ids(given: list[int | list[int]] | None, vocab_size: int) -> tuple[int, ...] | list[tuple[int, ...]]:
    """Those of all prompts, or of each."""
    param = "token_ids_logprob"
    if not given:
        return ()
    if len(set(map(type, given))) > 1:
        raise InvalidRequest(f"{param}: a list holds token ids, or lists of token ids", param=param)
    if isinstance(given[0], int):
        return check_token_ids(cast(list[int], given), vocab_size, param)
    return [check_token_ids(ids, vocab_size, param) for ids in cast(list[list[int]], given)]


def to_generate(
    request: GenerateRequest,
    *,
    rids: list[str],
    received_time: float,
    sampling: SamplingResolver,
) -> list[GenerateReqInput]:
    """Raises InvalidRequest."""
    wishes = to_wishes(request.body, len(rids), sampling.vocab_size)
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
