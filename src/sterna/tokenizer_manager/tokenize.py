"""Hop 3: `GenerateReqInput` → `TokenizedGenerateReqInput`. After this every token that influences the model is fixed."""

from __future__ import annotations

import msgspec

from sterna.errors import ContextLengthExceeded, InvalidRequest
from sterna.protocol.generate import GenerateReqInput, TokenizedGenerateReqInput
from sterna.text.tokenizer import Tokenizer

# Normalizers may shorten a text before it is cut into tokens; none that models use halves it.
SLACK = 4


def to_tokenized(
    obj: GenerateReqInput, tokenizer: Tokenizer, *, vocab_size: int, context_len: int, reply_to: str, epoch: int
) -> TokenizedGenerateReqInput:
    """Fix the request's tokens and its length.

    `max_new_tokens` None becomes the surface's default, or the rest of the context if that is less. A given one that passes the context's
    end is refused rather than cut, so that a client never gets fewer tokens than it was promised.
    Raises ContextLengthExceeded where prompt and output don't fit, InvalidRequest where there is no token or one outside the vocabulary.
    """
    input_ids = obj.input_ids
    field = "input_ids"
    if input_ids is None:
        assert obj.text is not None, "hop 2 sets text or input_ids"
        field = "prompt"
        # A text that is certain not to fit isn't tokenized: that takes a second per megabyte of a thread that others wait for.
        most = SLACK * context_len * tokenizer.longest_token
        if len(obj.text) > most:
            raise ContextLengthExceeded(
                f"the prompt has {len(obj.text)} characters; {context_len} tokens can't hold more than {most}", param=field
            )
        input_ids = tokenizer.encode(obj.text, add_special_tokens=obj.add_special_tokens)
    if not input_ids:
        raise InvalidRequest("the prompt holds no token", param=field)
    if not 0 <= min(input_ids) <= max(input_ids) < vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size})", param=field)
    params = obj.sampling_params
    room = context_len - len(input_ids)
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(input_ids)} tokens; the context of {context_len} tokens must hold it and at least one more", param=field
        )
    wanted = params.max_new_tokens
    if wanted is None:
        wanted = room if obj.default_max_new_tokens is None else min(room, obj.default_max_new_tokens)
    if wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {len(input_ids)} tokens and {wanted} more are asked for; the context holds {context_len}", param="max_tokens"
        )
    if params.min_new_tokens > wanted:
        raise InvalidRequest(f"min_tokens ({params.min_new_tokens}) exceeds the {wanted} tokens that may be generated", param="min_tokens")
    return TokenizedGenerateReqInput(
        rid=obj.rid,
        input_ids=input_ids,
        sampling_params=msgspec.structs.replace(params, max_new_tokens=wanted),
        stream=obj.stream,
        reply_to=reply_to,
        epoch=epoch,
        priority=obj.priority,
        received_time=obj.received_time,
        cache_namespace=obj.cache_namespace,
    )
