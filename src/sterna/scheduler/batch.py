"""`ScheduleBatch` → `ForwardBatch`: the rows of one step as flat arrays. Decodes first, then prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, WANT_NOTHING, WANT_SAMPLE, ForwardBatch
from sterna.mem_cache.allocator import Int32Array
from sterna.scheduler.decode import RunningBatch
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
    def is_last(self) -> bool:
        """After it the next token is sampled."""
        return self.end == len(self.req.fill_ids)

    @property
    def role(self) -> int:
        return ROLE_PROMPT if self.start < self.req.num_prompt else ROLE_GENERATED


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """What one step runs: rows `decodes.start .. decodes.stop - 1` of the running batch, then `chunks`."""

    decodes: slice
    chunks: list[PrefillChunk]

    @property
    def num_decodes(self) -> int:
        return int(self.decodes.stop - self.decodes.start)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + len(self.chunks)

    def single_rows(self) -> list[ScheduleBatch]:
        """Each row as a batch of its own."""
        decodes = [ScheduleBatch(slice(i, i + 1), []) for i in range(self.decodes.start, self.decodes.stop)]
        nobody = slice(0, 0)
        return [*decodes, *(ScheduleBatch(nobody, [chunk]) for chunk in self.chunks)]

    def only_req(self, running: RunningBatch) -> Req:
        """Of a batch of one row: whose it is."""
        return self.chunks[0].req if self.chunks else running.reqs[self.decodes.start]


def to_forward_batch(batch: ScheduleBatch, running: RunningBatch, ledger: KVLedger, step: int) -> ForwardBatch:
    """Slots for all of it are allocated already. Every array is the step's own, but the tables."""
    n = batch.num_decodes
    rows = running.req_pool_idx[batch.decodes].copy()
    prefix = running.kv_lens[batch.decodes].copy()
    last_token = running.last_token[batch.decodes]
    if not batch.chunks:
        ones = np.ones(n, dtype=np.uint8)
        return ForwardBatch(
            step=step,
            input_ids=last_token.copy(),
            input_from=None,
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
    splits = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=splits[1:])
    return ForwardBatch(
        step=step,
        input_ids=np.concatenate([last_token, *(chunk.req.fill_ids[chunk.start : chunk.end] for chunk in chunks)]),
        input_from=None,
        row_splits=splits,
        prefix_lens=prefix,
        seq_lens=prefix + lengths,
        req_pool_idx=rows,
        roles=np.array([ROLE_GENERATED] * n + [chunk.role for chunk in chunks], dtype=np.uint8),
        wants=np.array([WANT_SAMPLE] * n + [WANT_SAMPLE if chunk.is_last else WANT_NOTHING for chunk in chunks], dtype=np.uint8),
        groups=ledger.group_slots(np.repeat(rows, lengths), _positions(prefix, lengths, splits)),
    )


def _positions(prefix: Int32Array, lengths: Int32Array, splits: Int32Array) -> Int32Array:
    """(T,): each token's position in its row."""
    return np.arange(splits[-1], dtype=np.int32) + np.repeat(prefix - splits[:-1], lengths)
