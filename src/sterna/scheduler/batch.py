"""`ScheduleBatch` → `ForwardBatch`: the rows of one step as flat arrays. Decodes first, then prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, WANT_NOTHING, WANT_SAMPLE, ForwardBatch
from sterna.mem_cache.allocator import Int32Array
from sterna.scheduler.decode import Decodes, RunningBatch
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Positions `start .. end - 1` of `req.fill_ids`; all prompt, or all generated."""

    req: Req
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def begins_in_copy(self) -> bool:
        """It begins within a page, of which its step copies the beginning."""
        return bool(self.req.copied_from) and self.start == self.req.copied_len

    @property
    def is_last(self) -> bool:
        """After it the next token is sampled."""
        return self.end == len(self.req.fill_ids)

    @property
    def role(self) -> int:
        return ROLE_PROMPT if self.start < self.req.num_prompt else ROLE_GENERATED


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """What one step runs: a token for each of `decodes`, then `chunks`."""

    decodes: Decodes
    chunks: list[PrefillChunk]

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    def reqs(self) -> list[Req]:
        """By row."""
        return [*self.decodes.reqs, *(chunk.req for chunk in self.chunks)]

    def single_rows(self) -> list[ScheduleBatch]:
        """Each row as a batch of its own."""
        decodes = [ScheduleBatch(self.decodes.only([i]), []) for i in range(len(self.decodes))]
        return [*decodes, *(ScheduleBatch(self.decodes.only([]), [chunk]) for chunk in self.chunks)]


def to_forward_batch(batch: ScheduleBatch, running: RunningBatch, ledger: KVLedger, step: int, row_of: Int32Array | None) -> ForwardBatch:
    """Slots for all of it are allocated already. Every array is the step's own, but the tables.

    `row_of` (by `req_pool_idx`): the rows of the step before, where that hasn't been read: who is in it takes his token from there.
    """
    n = len(batch.decodes)
    rows, prefix = batch.decodes.rows.astype(np.int32), batch.decodes.positions
    last_token = running.last_token[batch.decodes.rows]
    input_from = None
    if row_of is not None:
        input_from = row_of[batch.decodes.rows]
        last_token[input_from >= 0] = 0
    if not batch.chunks:
        ones = np.ones(n, dtype=np.uint8)
        return ForwardBatch(
            step=step,
            input_ids=last_token,
            input_from=input_from,
            row_splits=np.arange(n + 1, dtype=np.int32),
            prefix_lens=prefix,
            seq_lens=prefix + np.int32(1),
            req_pool_idx=rows,
            roles=ones * ROLE_GENERATED,
            wants=ones * WANT_SAMPLE,
            groups=ledger.group_slots(rows, prefix),
        )
    chunks = batch.chunks
    prefix = np.concatenate([prefix, np.array([chunk.start for chunk in chunks], dtype=np.int32)])
    lengths = np.concatenate([np.ones(n, dtype=np.int32), np.array([chunk.length for chunk in chunks], dtype=np.int32)])
    rows = np.concatenate([rows, np.array([chunk.req.req_pool_idx for chunk in chunks], dtype=np.int32)])
    if input_from is not None:
        input_from = np.concatenate([input_from, np.full(len(chunks), -1, dtype=np.int32)])
    splits = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=splits[1:])
    return ForwardBatch(
        step=step,
        input_ids=np.concatenate([last_token, *(chunk.req.fill_ids[chunk.start : chunk.end] for chunk in chunks)]),
        input_from=input_from,
        row_splits=splits,
        prefix_lens=prefix,
        seq_lens=prefix + lengths,
        req_pool_idx=rows,
        roles=np.array([ROLE_GENERATED] * n + [chunk.role for chunk in chunks], dtype=np.uint8),
        wants=np.array([WANT_SAMPLE] * n + [WANT_SAMPLE if chunk.is_last else WANT_NOTHING for chunk in chunks], dtype=np.uint8),
        groups=ledger.group_slots(
            np.repeat(rows, lengths), _positions(prefix, lengths, splits), [chunk.req for chunk in chunks if chunk.begins_in_copy]
        ),
    )


def _positions(prefix: Int32Array, lengths: Int32Array, splits: Int32Array) -> Int32Array:
    """(T,): each token's position in its row."""
    return np.arange(splits[-1], dtype=np.int32) + np.repeat(prefix - splits[:-1], lengths)
