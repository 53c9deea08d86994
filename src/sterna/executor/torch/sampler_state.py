"""What the sampler remembers of each row between steps: a few numbers, and two vectors over the vocabulary where there are penalties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sterna.executor.base import Int32Array
from sterna.executor.torch.logprobs import wish_of
from sterna.protocol.logprobs import LogprobWish
from sterna.protocol.sampling import SamplingParams


@dataclass(slots=True, frozen=True)
class BoundRow:
    """The rare parts of a row's state; the common ones are columns of `SamplerState`."""

    penalty_slot: int | None
    """Row of `PenaltyCounts`."""
    bias_ids: torch.Tensor | None
    bias_values: torch.Tensor | None
    end_ids: torch.Tensor | None
    """Ids that may not come before output token `min_new_tokens`; None where there are none."""
    logprobs: LogprobWish | None


class PenaltyCounts:
    """Which tokens have occurred, for the rows whose penalties ask. Grows to as many rows as were ever bound with penalties at once."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._free: list[int] = []
        self.output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """(rows, vocab): how often each token occurs in the output."""
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """(rows, vocab)"""

    def take(self, prompt: Int32Array, output: Int32Array) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        vocab_size = self.in_prompt.shape[1]
        self.output_counts[slot] = torch.from_numpy(np.bincount(output, minlength=vocab_size)).to(self._device)
        self.in_prompt[slot] = torch.from_numpy(np.bincount(prompt, minlength=vocab_size) > 0).to(self._device)
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def _grow(self) -> None:
        rows = len(self.in_prompt)
        more = max(4, rows)
        self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(more, self.output_counts.shape[1])))
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])))
        self._free.extend(range(rows, rows + more))


class SamplerState:
    """All bound rows. A column is indexed by `req_pool_idx`."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.counts = PenaltyCounts(vocab_size, device)
        # Some files name end tokens that the model has no row for.
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._device = device
        self._rows: dict[int, BoundRow] = {}
        self.temperature: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.top_k: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """The vocabulary's size where it is off."""
        self.top_p: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.repetition: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.presence: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.frequency: NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.output_len: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Tokens sampled so far: the index of the next one."""
        self.min_new_tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.is_plain: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """No penalties, bias or end tokens to mask: the logits are taken as they are."""
        self.wants_logprobs: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def bind(self, index: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        """See `Executor.bind`."""
        if index in self._rows:
            raise ValueError(f"row {index} is bound")
        self._reserve(index + 1)
        row = self._make_row(params, prompt, output)
        self._rows[index] = row
        self.temperature[index] = params.temperature
        self.top_k[index] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.top_p[index] = params.top_p
        self.min_p[index] = params.min_p
        self.repetition[index] = params.repetition_penalty
        self.presence[index] = params.presence_penalty
        self.frequency[index] = params.frequency_penalty
        self.seed[index] = params.seed
        self.output_len[index] = len(output)
        self.min_new_tokens[index] = params.min_new_tokens
        self.is_plain[index] = row.penalty_slot is None and row.bias_ids is None and row.end_ids is None
        self.wants_logprobs[index] = row.logprobs is not None

    def release(self, index: int) -> None:
        row = self._rows.pop(index, None)
        if row is not None and row.penalty_slot is not None:
            self.counts.give_back(row.penalty_slot)

    def __getitem__(self, index: int) -> BoundRow:
        return self._rows[index]

    def require_bound(self, indices: Int32Array) -> None:
        """Raises ValueError naming the first row that isn't."""
        for index in indices.tolist():
            if index not in self._rows:
                raise ValueError(f"row {index} wants a sample and isn't bound")

    def _make_row(self, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> BoundRow:
        logprobs = wish_of(params, self.vocab_size)
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        bias_ids = bias_values = end_ids = None
        if params.logit_bias:
            bias_ids = torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64, device=self._device)
            bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device)
        if params.min_new_tokens > 0:
            ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})
            if ends:
                end_ids = torch.tensor(ends, dtype=torch.int64, device=self._device)
        return BoundRow(self.counts.take(prompt, output) if penalised else None, bias_ids, bias_values, end_ids, logprobs)

    def _reserve(self, rows: int) -> None:
        if rows <= len(self.output_len):
            return
        size = max(rows, 2 * len(self.output_len), 16)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition",
            "presence",
            "frequency",
            "seed",
            "output_len",
            "min_new_tokens",
            "is_plain",
            "wants_logprobs",
        ):
            column = getattr(self, name)
            grown = np.zeros(size, dtype=column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
