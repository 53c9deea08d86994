"""Hop 2: `GenerateRequest` → one `GenerateReqInput` per prompt."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.errors import InvalidRequest
from sterna.protocol.generate import CacheNamespace, GenerateReqInput
from sterna.server.fields import member_rid, to_rid, to_session
from sterna.server.logprobs import LogprobWish
from sterna.server.native.generate.protocol import GenerateRequest
from sterna.server.sampling import Lengths, SamplingResolver

DEFAULT_MAX_NEW_TOKENS = 128


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
