"""A step as index tensors: computed once from the `ForwardBatch`, used by every layer.

Linear layers see all T tokens in one flat batch. Attention sees *spans*: a span is up to `MAX_SPAN` consecutive query tokens of one row and
the keys up to its last one, in a KV group with a window from the first that any of its queries sees. Spans of similar size share a
*bucket*, padded to its largest: queries (B, n), keys (B, S).

Padding never reaches a slot that the row doesn't own: a padded key is the span's first key again, and a padded query its last query again.
So whatever lies in free slots, NaN included, is never read; masking has only to make numbers that are there not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sterna.executor.base import WANT_SAMPLE, ForwardBatch, Int32Array

MAX_SPAN = 256
"""Query tokens per span: bounds the mask's memory, and spares the first queries of a long chunk the last keys."""
_PADDING_SHARE = 1.5
"""A bucket's padded work may be this many times what its spans need, ..."""
_PADDING_FREE = 1024
"""... and this many query-key pairs more, which is about what another bucket costs in calls."""
_MAX_PAIRS = 1 << 22
"""Query-key pairs of a bucket of several spans."""

Int64Array = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class _Span:
    first_token: int
    """Index of its first query in the flat batch."""
    queries: int
    row: int
    first_key: int
    """Position of the first key that a query sees."""
    keys: int
    """Up to the last query's own."""

    @property
    def pairs(self) -> int:
        return self.queries * self.keys


@dataclass(slots=True)
class Bucket:
    """Spans whose attention is one call. B spans, n queries and S keys each, padded."""

    shape: tuple[int, int, int]
    """B, n, S."""
    tokens: torch.Tensor | None
    """(B * n,) int64: the flat token of each query; None where that is 0 .. T - 1 in order."""
    real: torch.Tensor | None
    """(real queries,) int64: which of the B * n are no padding; None where all are."""
    real_tokens: torch.Tensor | None
    """The flat tokens of `real`; None where `tokens` is."""
    slots: torch.Tensor
    """(B, S) int64."""
    query_positions: torch.Tensor
    """(B, n) int64."""
    key_positions: torch.Tensor
    """(B, S) int64; a padded key's is beyond every query's."""
    masks: dict[tuple[int | None, int], torch.Tensor | None]
    """By (window, query heads per key head). Filled by `mask`."""
    heads: dict[int, torch.Tensor]
    """By number of key heads. Filled by `kv_rows`."""

    def kv_rows(self, kv_heads: int) -> torch.Tensor:
        """(2 * B * kv_heads * S,) int64: where keys, then values, lie in a pool's layer seen as rows of one head each.

        So that what is gathered lies head by head, as products over many keys want it, at the price of a plain gather.
        """
        if kv_heads not in self.heads:
            head = torch.arange(2 * kv_heads, device=self.slots.device).view(2, 1, kv_heads, 1)
            self.heads[kv_heads] = (self.slots[None, :, None, :] * (2 * kv_heads) + head).reshape(-1)
        return self.heads[kv_heads]

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(B, 1, n * group, S): 0 where a query sees a key, -inf where not; None where every query sees every key.

        Query heads that share a key head lie beside each other: row q * group + h.
        """
        if (window, group) not in self.masks:
            self.masks[window, group] = self._make_mask(window, group, dtype)
        return self.masks[window, group]

    def _make_mask(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        queries, keys = self.query_positions[:, :, None], self.key_positions[:, None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        if not hidden.any():
            return None
        batch, count, length = self.shape
        mask = torch.zeros(batch, count, 1, length, dtype=dtype, device=hidden.device).masked_fill_(hidden[:, :, None], -torch.inf)
        return mask.expand(batch, count, group, length).reshape(batch, 1, count * group, length)


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Everything a forward pass needs besides weights. T tokens, S rows that want a sample."""

    positions: torch.Tensor
    """(T,) int64."""
    write_slots: tuple[torch.Tensor, ...]
    """Per KV group, (T,) int64."""
    buckets: tuple[tuple[Bucket, ...], ...]
    """Per KV group."""
    sample_rows: Int64Array
    """(S,): rows that want a sample."""
    sample_tokens: torch.Tensor
    """(S,) int64: the flat index of each one's last token."""


def make_plan(batch: ForwardBatch, windows: tuple[int | None, ...], device: torch.device) -> StepPlan:
    """Index tensors of a step, on `device`. `windows` are those of the KV groups."""
    splits = batch.row_splits.astype(np.int64)
    lengths = np.diff(splits)
    total = int(splits[-1])
    positions = np.arange(total, dtype=np.int64) + np.repeat(batch.prefix_lens - splits[:-1], lengths)
    sample_rows = np.flatnonzero(batch.wants == WANT_SAMPLE)
    return StepPlan(
        positions=_tensor(positions, device),
        write_slots=tuple(_tensor(group.out_cache_loc, device) for group in batch.groups),
        buckets=tuple(
            tuple(_bucket(batch, spans, group.req_to_token, total, device) for spans in _group(_spans(batch, window)))
            for group, window in zip(batch.groups, windows, strict=True)
        ),
        sample_rows=sample_rows,
        sample_tokens=_tensor(splits[sample_rows + 1] - 1, device),
    )


def _spans(batch: ForwardBatch, window: int | None) -> list[_Span]:
    spans = []
    for row, (start, end, prefix) in enumerate(
        zip(batch.row_splits[:-1].tolist(), batch.row_splits[1:].tolist(), batch.prefix_lens.tolist(), strict=True)
    ):
        for first in range(start, end, MAX_SPAN):
            count = min(MAX_SPAN, end - first)
            position = prefix + first - start
            first_key = 0 if window is None else max(0, position - window + 1)
            spans.append(_Span(first, count, row, first_key, position + count - first_key))
    return spans


def _group(spans: list[_Span]) -> list[list[_Span]]:
    """Divide spans into buckets: as few as keep the padding small. Spans of one bucket stay in the order of the batch."""
    groups: list[list[_Span]] = []
    queries = keys = pairs = 0
    for span in sorted(spans, key=lambda span: (-span.queries, -span.keys)):
        padded = (len(groups[-1]) + 1) * queries * max(keys, span.keys) if groups else 0
        if groups and padded <= min(_MAX_PAIRS, (pairs + span.pairs) * _PADDING_SHARE + _PADDING_FREE):
            groups[-1].append(span)
            keys, pairs = max(keys, span.keys), pairs + span.pairs
        else:
            groups.append([span])
            queries, keys, pairs = span.queries, span.keys, span.pairs
    return [sorted(group, key=lambda span: span.first_token) for group in groups]


def _bucket(batch: ForwardBatch, spans: list[_Span], req_to_token: Int32Array, total: int, device: torch.device) -> Bucket:
    first = np.array([span.first_token for span in spans], dtype=np.int64)[:, None]
    counts = np.array([span.queries for span in spans], dtype=np.int64)[:, None]
    lengths = np.array([span.keys for span in spans], dtype=np.int64)[:, None]
    starts = np.array([span.first_key for span in spans], dtype=np.int64)[:, None]
    rows = batch.req_pool_idx[[span.row for span in spans]].astype(np.int64)[:, None]
    shape = (len(spans), int(counts.max()), int(lengths.max()))

    query = np.minimum(np.arange(shape[1]), counts - 1)
    tokens = (first + query).reshape(-1)
    key = np.arange(shape[2])
    is_key = key < lengths
    positions = starts + np.where(is_key, key, 0)
    identity = len(tokens) == total and bool((tokens == np.arange(total)).all())
    real = None if (counts == shape[1]).all() else np.flatnonzero(np.arange(shape[1]) < counts)
    return Bucket(
        shape=shape,
        tokens=None if identity else _tensor(tokens, device),
        real=None if real is None else _tensor(real, device),
        real_tokens=None if identity else _tensor(tokens if real is None else tokens[real], device),
        slots=_tensor(req_to_token[rows, positions], device),
        query_positions=_tensor(starts + lengths - counts + query, device),
        key_positions=_tensor(np.where(is_key, positions, np.iinfo(np.int32).max), device),
        masks={},
        heads={},
    )


def _tensor(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device, non_blocking=True)
