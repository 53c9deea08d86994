"""Hop 3: `GenerateReqInput` → `TokenizedGenerateReqInput`. After this every token that influences the model is fixed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sterna.errors import ContextLengthExceeded, InvalidRequest
from sterna.protocol.generate import GenerateReqInput, TokenizedGenerateReqInput
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.session import Context, Turn

# Normalizers may shorten a text before it is cut into tokens; none that models use halves it.
SLACK = 4
MAX_LOGPROBS = 4 * 2**20
"""Of one answer, the prompts of a list together: about 100 MB of JSON."""


# Stands for the end of an answer while what follows it is encoded.
ANCHOR = "x"


def to_tokenized(
    obj: GenerateReqInput,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    context_len: int,
    reply_to: str,
    epoch: int,
    turn: Turn | None = None,
    leading_bos: int | None = None,
) -> TokenizedGenerateReqInput:
    """Fix the request's tokens and its length.

    `turn` is its place in a session, whose tokens it goes on from; `leading_bos` the id that only a context's beginning has.
    `max_new_tokens` None becomes the surface's default, or the rest of the context if that is less. A given one that passes the context's
    end is refused rather than cut, so that a client never gets fewer tokens than it was promised.
    Raises ContextLengthExceeded where prompt and output don't fit, InvalidRequest where there is no token or one outside the vocabulary.
    """
    field = "input_ids" if obj.text is None else "prompt"
    context = Context([]) if turn is None else turn.context(tokenizer)
    own = _own_ids(obj, context, tokenizer, context_len)
    closes_answer = obj.session is not None and obj.session.closes_answer
    if context.ids and own and own[0] == leading_bos and not closes_answer:
        own = own[1:]
    input_ids = context.ids + own
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


def check_logprobs(members: Iterable[TokenizedGenerateReqInput]) -> None:
    """Raises InvalidRequest where the logprobs that `members`, one HTTP request, may make are more than an answer may hold."""
    asking = [params for each in members if (params := each.sampling_params).return_logprob]
    most = sum((params.max_new_tokens or 0) * (1 + params.top_logprobs_num + len(params.token_ids_logprob)) for params in asking)
    if most > MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs: {most} numbers could come of this; an answer holds {MAX_LOGPROBS}. Ask for fewer, or set max_tokens",
            param="logprobs",
        )


def _own_ids(obj: GenerateReqInput, context: Context, tokenizer: Tokenizer, context_len: int) -> list[int]:
    """The ids that `obj` adds to `context`."""
    if obj.text is None:
        assert obj.input_ids is not None, "hop 2 sets text or input_ids"
        return obj.input_ids
    # A text that is certain not to fit isn't tokenized: that takes a second per megabyte of a thread that others wait for.
    most = SLACK * context_len * tokenizer.longest_token
    if len(obj.text) > most:
        raise ContextLengthExceeded(
            f"the prompt has {len(obj.text)} characters; {context_len} tokens can't hold more than {most}", param="prompt"
        )
    if obj.session is not None and obj.session.closes_answer:
        return encode_after_answer(tokenizer, context.text + obj.text)
    return tokenizer.encode(obj.text, add_special_tokens=obj.add_special_tokens)


def encode_after_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` where a text stands before it: some tokenizers put a space in front of the very first character."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    ids = tokenizer.encode(ANCHOR + text, add_special_tokens=False)
    # A text that would melt into the anchor would melt into an answer, too; the answer's tokens are fixed, so it is encoded alone.
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else tokenizer.encode(text, add_special_tokens=False)


def leading_bos(tokenizer: Tokenizer, bos_token_id: int | None, chat_template: str) -> int | None:
    """The id that stands at a context's beginning and nowhere else; None where there is none.

    Some models (SmolLM2) call the token BOS that opens every turn of a conversation. Their tokenizers put none in front of a text, and
    their templates spell it out.
    """
    token = None if bos_token_id is None else tokenizer.id_to_token(bos_token_id)
    if token is None:
        return None
    put_there = tokenizer.encode("", add_special_tokens=True)[:1] == [bos_token_id]
    return bos_token_id if put_there or token not in chat_template else None
