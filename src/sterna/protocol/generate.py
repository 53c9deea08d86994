"""The shapes that a generating request takes on its round trip, hop by hop (docs/architecture.md).

Narrow messages: each drops what the next stage doesn't need and adds what it does. All are frozen; what changes over time
(`ReqState`, `Req`, `DecodeStatus`) lives in its owner's process and never crosses.
Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sterna.protocol.finish import ABORTED, FinishAbort, FinishReason
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams


class CacheNamespace(msgspec.Struct, frozen=True, array_like=True):
    """Prefixes are shared only inside one namespace. Hashable: it is part of the radix key."""

    salt: str = ""
    adapter: str = ""


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """Reserved: one image, sound or video behind a run of placeholder tokens."""

    handle: str
    content_hash: int
    """64 bits; stands in the radix key where the placeholder ids stand in the prompt."""
    offset: int
    length: int


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A request's place in a session (docs/sessions.md): a body's `session_params`, under SGLang's names."""

    id: str
    """The session's."""
    rid: str | None = None
    """The turn whose context this one goes on from; None begins a context of its own."""
    offset: int = 0
    """> 0: that many tokens of the context are kept; < 0: that many are cut off its end; 0: all are kept."""
    replace: bool = False
    """Instead of whatever goes on from there already."""
    drop_previous_output: bool = False
    """The context ends before the answer of `rid`."""
    closes_answer: bool = False
    """`text` comes out of a chat template, from the end of the previous answer on: it brings what closes the assistant's turn."""


class GenerateReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """Hop 2: any surface's request, as the model needs it: the prompt rendered, stops merged, sampling validated.

    Exactly one of `text` and `input_ids` is set.
    """

    rid: str
    text: str | None = None
    input_ids: list[int] | None = None
    add_special_tokens: bool = True
    """Whether hop 3 adds the tokenizer's own BOS and the like to `text`; False for a rendered chat template."""
    sampling_params: SamplingParams
    default_max_new_tokens: int | None = None
    """Where `max_new_tokens` is None: this many, or the rest of the context if that is less; None is the rest of the context."""
    stream: bool = False
    priority: int = 0
    cache_namespace: CacheNamespace = CacheNamespace()
    session: SessionTurn | None = None
    received_time: float = 0.0
    templated_time: float | None = None


class TokenizedGenerateReqInput(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """Hop 3: the tokens that the model will see. Nothing later adds to or changes what is decided here."""

    rid: str
    input_ids: list[int]
    """At least one id, each in [0, vocab_size)."""
    sampling_params: SamplingParams
    """`max_new_tokens` is set and fits the context."""
    stream: bool
    reply_to: str
    """Address of the server's inbox."""
    epoch: int = 0
    """The scheduler epoch that it was sent to."""
    priority: int = 0
    received_time: float = 0.0
    """When the server got it: what ageing counts from. 0: when the scheduler does."""
    cache_namespace: CacheNamespace = CacheNamespace()
    resume_output_ids: list[int] = []
    """Output tokens that the server already accepted in an earlier epoch: the request goes on after them."""
    resume_chars: int = 0
    """Characters of their text that the server has: the first row's text begins after those."""
    media_items: tuple[MediaItem, ...] = ()
    """Reserved."""
    input_embeds: bytes | None = None
    """Reserved."""


class BatchTokenizedGenerateReqInput(msgspec.Struct, frozen=True, kw_only=True, tag="generate_batch"):
    """A fan-out (several samples, a list of prompts): its members arrive together, so that they can share a prefix."""

    reqs: list[TokenizedGenerateReqInput]


class AbortReq(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End this rid (exactly this one) wherever it is. Its terminal output still comes, once."""

    rid: str
    reason: FinishAbort = ABORTED
    """What its terminal output says."""


class SchedulerMark(msgspec.Struct, frozen=True, array_like=True):
    """One transition of a request inside the scheduler that may happen more than once."""

    at: float
    kind: Literal["chunk", "retracted", "readmitted"]
    tokens: int
    """Tokens whose KV is there: behind a chunk, when it was retracted, and found in the cache when it was readmitted."""


class SchedulerTimes(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler saw; on a request's first row and on its terminal row, never per token."""

    received: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    retractions: int = 0
    chunks: int = 0
    """Prefill chunks run."""
    marks: tuple[SchedulerMark, ...] = ()
    """In order of time, `MAX_MARKS` at most: of more, the first half and the latest."""


MAX_MARKS = 32
"""Of one request; what happened oftener is only counted."""


class DecodeOpening(msgspec.Struct, frozen=True, array_like=True):
    """On a rid's first row: what the detokenizer needs to make its `DecodeStatus`."""

    prompt_tail: list[int]
    """The prompt's last tokens: left context of the first output token."""
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    stop: tuple[str, ...]
    reply_to: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    resume_output_ids: list[int] = []
    """The output before the row's first token, made in an earlier epoch: the decoder begins with it, as if it had made its text itself."""
    resume_chars: int = 0
    """Characters of that text that the server has. What it lacks (held back, or an unfinished character) comes with later rows."""


class TokenIDRow(msgspec.Struct, frozen=True, array_like=True):
    """New output of one rid."""

    rid: str
    start: int
    """Index, in the rid's whole output, of `output_ids[0]`."""
    output_ids: list[int]
    """0..k tokens."""
    finished_reason: FinishReason | None = None
    opening: DecodeOpening | None = None
    times: SchedulerTimes | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `output_ids`; None where the request asked for none."""


class BatchTokenIDOutput(msgspec.Struct, frozen=True, kw_only=True, tag="token_ids"):
    """Hop 6: what one step produced. Also carries every ending that no step produced (refusals, aborts)."""

    epoch: int
    """Of the scheduler that made every row of it."""
    rows: list[TokenIDRow]


class StrRow(msgspec.Struct, frozen=True, array_like=True):
    """New text of one rid: stable, exact, sent once."""

    rid: str
    start: int
    output_ids: list[int]
    output_str: str
    finished_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    times: SchedulerTimes | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `output_ids`; None where the request asked for none."""


class BatchStrOutput(msgspec.Struct, frozen=True, kw_only=True, tag="strs"):
    """Hop 7: `BatchTokenIDOutput` with text deltas beside its ids."""

    epoch: int
    """The scheduler's, passed on."""
    detokenized_time: float
    rows: list[StrRow]
