"""The executor seam: token ids and KV slots (NumPy, int32) go in, token ids come out; no tensor crosses it.

An `Executor` owns weights, KV memory and the sampler's state. The scheduler owns which slot holds which token of whom.

    scheduler                                executor
    bind(req_pool_idx, params, prompt, out)  sampler state beside the row, so that a step sends no history
    submit(ForwardBatch) -> StepHandle       may return before the step is done
    handle.result() -> StepOutput            waits for it
    release(req_pool_idx)                    sampler state dropped

A step may be submitted before the one before it is read: at most two are unread at any time, and they run in their order. Steps are read in
that order too, each once. The scheduler reuses a slot, and binds or releases a row, only after the last step that has to do with it has
returned its result; rows that no unread step has may be bound and released at any time.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sterna.mem_cache.allocator import Int32Array as Int32Array
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams

UInt8Array = NDArray[np.uint8]
NO_PAGES: Int32Array = np.zeros(0, dtype=np.int32)

ROLE_PROMPT, ROLE_GENERATED = 0, 1
"""What a row's tokens are: a request's prompt (its whole history) or tokens that it generated (replayed ones included).
An engine may compute the two with different arithmetic, but must let nothing else influence it (invariant 7)."""

WANT_NOTHING, WANT_SAMPLE = 0, 1
"""What a row asks of a step. Reserved: 2 prompt logprobs from a position, 3 a pooled vector."""

STATUS_OK, STATUS_NAN = 0, 1
"""What became of a row: `STATUS_NAN` gives no token; its neighbours are unharmed."""


@dataclass(slots=True, frozen=True)
class GroupSlots:
    """Where one KV group's keys and values lie."""

    out_cache_loc: Int32Array
    """(tokens,): the slot that each input token's K and V are written to."""
    req_to_token: Int32Array
    """(req_pool_size, max_context): row `req_pool_idx`, column position -> slot. The scheduler's own table, shared read-only; entries below
    a row's `seq_lens` are fixed while the step runs. In a group with a window, entries that none of the row's queries sees (positions
    up to `prefix_lens` - window) mean nothing, their slots may be somebody else's by now, and an executor must not read them."""
    copied_from: Int32Array = field(default_factory=lambda: NO_PAGES)
    """(copies,): first slots of pages that are copied whole, before the step writes anything; in every group those of the same tokens."""
    copied_to: Int32Array = field(default_factory=lambda: NO_PAGES)
    """(copies,): to where. Each is a page of one row, whose tokens begin within it: what lies in it from there on, they overwrite."""


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """One step over R rows and T = sum of row lengths input tokens.

    A row is one request: a prefill chunk, or one generated token (or several replayed ones).

    Row r's tokens are `input_ids[row_splits[r]:row_splits[r + 1]]`, at positions `prefix_lens[r] .. seq_lens[r] - 1`, and attend to
    slots `req_to_token[req_pool_idx[r], :seq_lens[r]]`, causally, and in a group with a window only to those inside it.
    """

    step: int
    """Counts from 0; for logs and for `input_from`."""
    input_ids: Int32Array
    """(T,)"""
    input_from: Int32Array | None
    """(R,) or None: where >= 0, the row's only input token is the one that row `input_from[r]` of step `step - 1` samples.

    `input_ids` then holds 0 there. Where that row gives no token (`STATUS_NAN`) this one is surplus: nobody looks at what it gives, and its
    neighbours are unharmed.
    """
    row_splits: Int32Array
    """(R + 1,)"""
    prefix_lens: Int32Array
    """(R,): tokens whose KV lies in the slots already."""
    seq_lens: Int32Array
    """(R,): prefix_lens + row lengths."""
    req_pool_idx: Int32Array
    """(R,): distinct; each bound if the row wants a sample."""
    roles: UInt8Array
    """(R,)"""
    wants: UInt8Array
    """(R,)"""
    groups: tuple[GroupSlots, ...]
    """One per `ModelSpec.kv_groups`."""

    @property
    def num_rows(self) -> int:
        return len(self.req_pool_idx)


@dataclass(slots=True, frozen=True)
class StepOutput:
    """Ragged: row r's new tokens are `token_ids[row_splits[r]:row_splits[r + 1]]`, none or more."""

    step: int
    token_ids: Int32Array
    row_splits: Int32Array
    """(R + 1,)"""
    status: UInt8Array
    """(R,)"""
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """One per token of `token_ids`; None for those of a row that was bound without `return_logprob`, and in place of all where no row was
    bound with it."""


class StepHandle(Protocol):
    def result(self) -> StepOutput:
        """Wait for the step. Raises what the executor raised; the whole step has then produced nothing (`Executor.submit`)."""
        ...


@dataclass(slots=True, frozen=True)
class ExecutorInfo:
    """What an executor is and can do; fixed once made."""

    name: str
    dtype: str
    device: str
    group_slots: tuple[int, ...]
    """KV slots of each group of `ModelSpec.kv_groups`; of n, slots 0 .. n - 1 are all usable."""
    group_windows: tuple[int | None, ...]
    """Each group's window in tokens; None where a group holds every token."""
    page_size: int
    """Slots are allocated in aligned runs of this many."""
    max_batch_rows: int
    max_context_len: int
    reuse_generated_kv: bool
    """Whether KV computed in the role `generated` may serve as a prefix for a prompt."""
    exactness: Literal["bitwise", "token", "none"]
    """What invariant 7 amounts to here."""
    kv_bytes_per_token: int
    """Over all groups."""
    overlap: bool = True
    """Whether steps run on after `submit`, so that it pays to submit the next one before this one is read. Where a step is over when
    `submit` returns, that would only make every result a step late."""
    details: dict[str, str | int | float | bool] = field(default_factory=dict)
    """For `/server_info`."""

    @property
    def num_slots(self) -> int:
        """Slots of the first group."""
        return self.group_slots[0]


class Executor(abc.ABC):
    """One model on one device. Not thread-safe: one scheduler calls it."""

    info: ExecutorInfo

    @abc.abstractmethod
    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        """Make the sampler's state for a row: penalties over `prompt` (P,) and `output` (O,) tokens, bias, seed.

        The next token sampled is output token O: the random stream is keyed by (seed, output index), so a replay draws the same.
        Raises ValueError where `req_pool_idx` is bound, and for a token whose logprob is asked for and that isn't in the vocabulary.
        """

    @abc.abstractmethod
    def release(self, req_pool_idx: int) -> None:
        """Drop the row's sampler state. Idempotent."""

    @abc.abstractmethod
    def submit(self, batch: ForwardBatch) -> StepHandle:
        """Start a step. Its sampled tokens are appended to the sampler state of their rows.

        Where this or `result` raises, the step has produced nothing: what its rows would have written to their slots is undefined, as is
        their sampler's state; everything else is as before. The caller releases such a row, and may bind it again and repeat its tokens in
        another step, over the same slots. A step that takes tokens of one that failed fails too.
        """

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Free memory and threads. Steps that haven't been read are given up: waiting for one ends soon, perhaps by raising; rows may still
        be released. Idempotent."""
