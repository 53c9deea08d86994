"""Hop 2: `CompletionRequest` → one `GenerateReqInput` per prompt."""

from __future__ import annotations

from sterna.protocol.generate import CacheNamespace, GenerateReqInput
from sterna.protocol.logprobs import LogprobWish
from sterna.server.fields import member_rid, to_session
from sterna.server.openai.completion.protocol import CompletionRequest, to_prompts
from sterna.server.openai.fields import lengths
from sterna.server.sampling import SamplingResolver

DEFAULT_MAX_TOKENS = 16


def to_generate(request: CompletionRequest, *, rid: str, received_time: float, sampling: SamplingResolver) -> list[GenerateReqInput]:
    """A list of prompts shares everything but the prompt: each member gets what it would get alone, its own drawn seed included.

    Raises InvalidRequest.
    """
    prompts = to_prompts(request.prompt)
    logprobs = None if request.logprobs is None else LogprobWish(request.logprobs)
    return [
        GenerateReqInput(
            rid=member_rid(rid, index) if len(prompts) > 1 else rid,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling_params=sampling.resolve(request, lengths(request, request.max_tokens), logprobs=logprobs),
            default_max_new_tokens=DEFAULT_MAX_TOKENS,
            stream=bool(request.stream),
            priority=request.priority or 0,
            cache_namespace=CacheNamespace(salt=request.cache_salt or ""),
            session=to_session(request.session_params),
            received_time=received_time,
        )
        for index, prompt in enumerate(prompts)
    ]
