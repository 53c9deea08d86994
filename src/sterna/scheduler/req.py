"""`Req`: one generating request as the scheduler knows it. Never crosses a process.

WAITING ──admitted──> PREFILL ──last chunk sampled──> RUNNING ──stop, length, abort, fault──> FINISHED
   ^                     │                               │
   └──────── retracted (to the queue's front) ───────────┘        every state may go to FINISHED directly
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from sterna.mem_cache.allocator import Int32Array, Int64Array
from sterna.protocol.finish import FinishReason
from sterna.protocol.generate import MAX_MARKS, CacheNamespace, SchedulerMark, SchedulerTimes
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams, describe

if TYPE_CHECKING:
    from sterna.mem_cache.prefix_cache import PrefixNode
    from sterna.scheduler.stops import TextStops


class ReqState(Enum):
    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Req:
    rid: str
    serial: int
    """Order of arrival."""
    prompt_ids: Int32Array
    output_ids: list[int]
    sampling_params: SamplingParams
    max_new_tokens: int
    output_interval: int
    """Tokens between two rows of output, after the first."""
    reply_to: str
    cache_namespace: CacheNamespace
    received_time: float
    """When it came here."""
    num_resumed: int
    """Outputs that it came with (`resume_output_ids`): the first row starts after them."""
    resume_chars: int
    token_stops: frozenset[int]
    """Its own stop ids; the model's end tokens are apart."""
    text_stops: TextStops | None = None
    priority: int = 0
    arrival_time: float = 0.0
    """When the server got it: a request that comes back after a crash hasn't grown young."""
    state: ReqState = ReqState.WAITING
    finished_reason: FinishReason | None = None

    # What it holds; `kv.py` draws which region is whose.
    req_pool_idx: int = -1
    fill_ids: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """What prefill computes: prompt, and the outputs it had when it was (re)admitted."""
    kv_len: int = 0
    """Tokens whose KV is computed, by steps that have been read. Not kept while it runs: then it is all but the last token."""
    submitted_len: int = 0
    """While it is in prefill: tokens that have been given to a step; those beyond `kv_len` are in flight."""
    tree_len: int = 0
    allocated_len: int = 0
    copied_len: int = 0
    """Where its first step begins, if within a page."""
    copied_from: tuple[int, ...] = ()
    """By group, the page whose beginning that step copies; none once it has been read."""
    window_starts: tuple[int, ...] = ()
    """Per KV group with a window: the first position whose slot it still holds."""
    node: PrefixNode | None = None
    """What it has locked."""
    match_node: PrefixNode | None = None
    """What it locks once it has copied a page: the end of its prefix, while `node` is that page's."""

    # What was said of it.
    num_sent: int = 0
    """Outputs that have left, those it came with included."""
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the outputs that haven't left, where it asked for them."""
    opened: bool = False
    cached_tokens: int = 0
    """Of the prompt, at its first admission."""
    has_waited_for_prefix: bool = False
    retractions: int = 0
    chunks: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    marks: list[SchedulerMark] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def tokens_left(self) -> int:
        """Outputs that it may still make."""
        return self.max_new_tokens - len(self.output_ids)

    def all_ids(self) -> Int32Array:
        """(num_tokens,): prompt and output."""
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, dtype=np.int32)]) if self.output_ids else self.prompt_ids

    def cache_key(self, length: int) -> Int64Array:
        """(length,): its first tokens as the prefix cache compares them."""
        ids = self.prompt_ids if length <= self.num_prompt else self.all_ids()
        return ids[:length].astype(np.int64)

    def describe(self) -> str:
        """For the log, where the request has made something fail: its size and parameters, and nothing of its text."""
        return describe(self.sampling_params, self.num_prompt, len(self.output_ids))

    def mark(self, mark: SchedulerMark) -> None:
        """For the flight recorder. Where they are too many the middle ones go: how it began and what came last say most."""
        if len(self.marks) == MAX_MARKS:
            del self.marks[MAX_MARKS // 2]
        self.marks.append(mark)

    def times(self) -> SchedulerTimes:
        return SchedulerTimes(
            self.received_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.retractions,
            self.chunks,
            tuple(self.marks),
        )
