"""Messages that aren't a generating request."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sterna.protocol.generate import SchedulerTimes

ProcessName = Literal["scheduler", "detokenizer"]
"""The server's children."""
PROCESSES: tuple[ProcessName, ...] = get_args(ProcessName)
EndCause = Literal["signal", "exit"]
"""What ended a process: a signal, or itself."""


class FlushCacheReq(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Drop every prefix that no live request holds."""

    control_id: int
    reply_to: str


class FlushCacheOutput(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache_output"):
    control_id: int
    flushed_tokens: int


class SchedulingStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """These requests have left the waiting queue, for the first time in this epoch: they hold a row and memory.

    Directly to the server: the waiting timeout must not wait for a first token. Said once per rid, however often it is retracted.
    """

    epoch: int
    rids: list[str]
    time: float
    """CLOCK_MONOTONIC."""


class LookUpReq(msgspec.Struct, frozen=True, kw_only=True, tag="look_up"):
    """Where are these live requests? For whoever watches one: the gauges don't grow with the number of requests."""

    control_id: int
    reply_to: str
    rids: list[str]


class LiveReq(msgspec.Struct, frozen=True, array_like=True):
    """A live request as the scheduler knows it at this moment."""

    rid: str
    state: Literal["waiting", "prefill", "running"]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    times: SchedulerTimes


class LookUpOutput(msgspec.Struct, frozen=True, kw_only=True, tag="look_up_output"):
    control_id: int
    reqs: list[LiveReq]
    """Those of the asked that are alive."""


class OutputCredit(msgspec.Struct, frozen=True, kw_only=True, tag="credit"):
    """The server has folded this many batches of output; the scheduler may have as many more in flight."""

    batches: int


class NewDetokenizerReq(msgspec.Struct, frozen=True, kw_only=True, tag="new_detokenizer"):
    """The detokenizer has died, and what was on its way with it; another one starts. The scheduler drops every request without a word (the
    server sends them again), keeps their KV where it may, and makes its rows in a new epoch from here on."""

    epoch: int
    detokenizer: str
    """Address of the new one's inbox."""


class ShutdownReq(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the process. Live requests get their terminal output first."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, tag="scheduler_stats"):
    """A gauge of the scheduler: sent when it changed, at most a few times a second, and once whenever it falls idle."""

    epoch: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_total_tokens: int
    """Slots of the pool."""
    kv_used_tokens: int
    """Held by running requests or locked in the prefix cache; 0 when idle."""
    kv_evictable_tokens: int
    prompt_tokens_total: int
    cached_tokens_total: int
    """Both since start: the hit rate is their quotient."""
    output_tokens_total: int
    retractions_total: int
    steps_total: int
    max_batch_size: int
    """Most rows in one step since start."""


class ProcessReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A child has loaded what it needs and is at its loop."""

    process: ProcessName
    epoch: int
    info: dict[str, str | int | float | bool]
    """For `/server_info`: executor, dtype, KV slots, promises of exactness, …"""


class ProcessFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A child can't start; it exits after sending this."""

    process: ProcessName
    message: str


class DecodeRefused(msgspec.Struct, frozen=True, kw_only=True, tag="decode_refused"):
    """The detokenizer can't decode this rid (no room, or a fault): the server aborts it.

    The rid's terminal row, when the scheduler sends it, leaves the detokenizer with the reason for the refusal.
    """

    rid: str
    epoch: int
    """Of the scheduler whose output was refused."""
