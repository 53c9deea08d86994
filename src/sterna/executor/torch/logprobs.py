"""Log-probabilities of output tokens (`protocol/logprobs.py`), for the rows of a step that ask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sterna.protocol.logprobs import LEAST_LOGPROB, LogprobWish, TokenLogprobs
from sterna.protocol.sampling import SamplingParams

_ROWS = 16
"""Rows that are looked at in float64 at once: bounds the memory of a step."""


def wish_of(params: SamplingParams, vocab_size: int) -> LogprobWish | None:
    """None where `params` ask for no logprobs; `top` is at most the vocabulary. Raises ValueError for a token outside it."""
    if not params.return_logprob:
        return None
    for token in params.token_ids_logprob:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logprob token {token} is not in a vocabulary of {vocab_size}")
    return LogprobWish(min(params.top_logprobs_num, vocab_size), params.token_ids_logprob)


@dataclass(slots=True, frozen=True)
class StepLogprobs:
    """Of N rows that ask: float32, on the sampler's device until they are read. A row that asks for less than another gets more here."""

    places: NDArray[np.intp]
    """(N,): where each row stands among those that the step samples."""
    wishes: tuple[LogprobWish, ...]
    chosen: torch.Tensor
    """(N,)"""
    top_ids: torch.Tensor
    """(N, most asked for) int64"""
    top: torch.Tensor
    """(N, most asked for): -inf for tokens that aren't possible, which come last."""
    of_ids: torch.Tensor
    """(N, most asked for)"""

    def by_place(self) -> dict[int, TokenLogprobs]:
        """Waits for the device."""
        chosen, top_ids, top, of_ids = (each.tolist() for each in (self.chosen, self.top_ids, self.top, self.of_ids))
        possible = (self.top > -torch.inf).sum(dim=1).tolist()
        told = {}
        for at, (place, wish) in enumerate(zip(self.places.tolist(), self.wishes, strict=True)):
            count = min(wish.top, possible[at])
            told[place] = TokenLogprobs.pack(chosen[at], top_ids[at][:count], top[at][:count], of_ids[at][: len(wish.token_ids)])
        return told


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor, places: NDArray[np.intp], wishes: tuple[LogprobWish, ...]) -> StepLogprobs:
    """`logits` (N, vocab) float32, the model's own; `ids` (N,) int64, what each row samples. Rows without a finite maximum mean nothing."""
    largest = logits.amax(dim=1, keepdim=True).double()
    sums = [(rows - most).exp_().sum(dim=1) for rows, most in zip(logits.split(_ROWS), largest.split(_ROWS), strict=True)]
    log_sums = torch.cat(sums)[:, None].log_()
    top_ids = torch.cat([_top_ids(rows, max(wish.top for wish in wishes)) for rows in logits.split(_ROWS)])
    top_logits = logits.gather(1, top_ids)

    def told(values: torch.Tensor) -> torch.Tensor:
        return (values - largest - log_sums).clamp_(min=LEAST_LOGPROB).float()

    top = told(top_logits).masked_fill_(top_logits == -torch.inf, -torch.inf)
    chosen = told(logits.gather(1, ids[:, None])).squeeze(1)
    of_ids = told(logits.gather(1, _padded_ids(wishes, logits.device)))
    return StepLogprobs(places, wishes, chosen, top_ids, top, of_ids)


def _padded_ids(wishes: tuple[LogprobWish, ...], device: torch.device) -> torch.Tensor:
    """(N, most asked for). Doesn't wait for the device, which has a forward to run."""
    ids = np.zeros((len(wishes), max(len(wish.token_ids) for wish in wishes)), dtype=np.int64)
    for row, wish in zip(ids, wishes, strict=True):
        row[: len(wish.token_ids)] = wish.token_ids
    return torch.from_numpy(ids).to(device, non_blocking=True)


def _top_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """(N, count): of the largest, the lowest id first among equals, which `topk` doesn't promise. So it gets no equals: the bits of a
    float32 as a number of the same order, then the id from the vocabulary's end, in one int64."""
    if not count:  # spares a look at the whole vocabulary
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
