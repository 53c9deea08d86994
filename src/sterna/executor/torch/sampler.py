"""Logits to token ids, for all rows of a step at once.

Order: repetition penalty, presence and frequency penalties, logit bias, end tokens masked before `min_new_tokens`; then, where the
temperature isn't 0, z = (logit - largest) / temperature, top_k, top_p, min_p, and the largest z + noise (`executor/philox.py`) among what
is left.

- repetition (Keskar et al. 2019): the logit of a token in prompt or output is divided by the penalty where positive, multiplied where not.
- presence, frequency: `presence + frequency * count` is taken off the logit of a token that occurs `count` > 0 times in the output.
- top_k keeps the k largest; top_p, among those, the tokens such that the likelier ones together hold less than top_p of the mass;
  min_p those whose probability is at least min_p times the largest. Each keeps or drops equal logits together, so that each is a
  threshold on z, and no order among equals matters. At temperature 0 the lowest id wins.

A row's NaN or infinity stays its own: it is reported by `Sampled.ok`, masked or not, and its id means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sterna.executor.base import Int32Array
from sterna.executor.philox import NOISE_MAX, NOISE_MIN
from sterna.executor.torch.gumbel import block_noise
from sterna.executor.torch.logprobs import StepLogprobs, logprobs_of
from sterna.executor.torch.sampler_state import SamplerState
from sterna.protocol.logprobs import LogprobWish
from sterna.protocol.sampling import SamplingParams

_TOP = 512
"""Largest logits that top_p looks at before it sorts the whole row."""
_BLOCKS = 1 << 16
"""Blocks of four candidates whose noise is made at once: bounds the memory of a step."""
_NO_HOPE = NOISE_MIN - NOISE_MAX - 0.001
"""A z (at most 0) below this can't win: the likeliest token's worst noise beats it. The margin is for float32 rounding."""


@dataclass(slots=True, frozen=True)
class Sampled:
    """On the sampler's device."""

    ids: torch.Tensor
    """(S,) int64."""
    ok: torch.Tensor
    """(S,) bool: False where the logits had no finite maximum, before or after they were edited."""
    logprobs: StepLogprobs | None
    """Of the rows that ask; None where none does."""


class Sampler:
    """One per executor; `state` lives beside the scheduler's rows."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.state = SamplerState(vocab_size, eos_token_ids, device)
        self._device = device

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        self.state.bind(req_pool_idx, params, prompt, output)

    def release(self, req_pool_idx: int) -> None:
        self.state.release(req_pool_idx)

    def sample(self, logits: torch.Tensor, rows: Int32Array) -> Sampled:
        """One token for each of `rows` (S,), which are bound, from `logits` (S, vocab) float32; overwrites `logits`.

        The tokens count as output from here on. A row that isn't ok has none, and has lost its place: it can only be released.
        """
        state = self.state
        asking = np.flatnonzero(state.wants_logprobs[rows])
        own = logits.index_select(0, self._tensor(asking)) if len(asking) else None  # before they are edited
        ok: torch.Tensor | bool = True
        if not state.is_plain[rows].all():
            ok = torch.isfinite(logits.amax(dim=1))
            self._penalise(logits, rows)
            self._bias(logits, rows)
        largest, ids = logits.max(dim=1)
        random = np.flatnonzero(state.temperature[rows] > 0)
        if len(random) == len(rows):
            ids = self._draw(logits, largest, rows)
        elif len(random):
            chosen = self._tensor(random)
            ids = ids.index_copy(0, chosen, self._draw(logits.index_select(0, chosen), largest.index_select(0, chosen), rows[random]))
        self._advance(ids, rows)
        logprobs = None
        if own is not None:
            logprobs = logprobs_of(own, ids.index_select(0, self._tensor(asking)), asking, self._wishes(rows[asking]))
        return Sampled(ids, torch.isfinite(largest) & ok, logprobs)

    def _wishes(self, rows: Int32Array) -> tuple[LogprobWish, ...]:
        return tuple(wish for index in rows.tolist() if (wish := self.state[index].logprobs) is not None)

    def _penalise(self, logits: torch.Tensor, rows: Int32Array) -> None:
        where, slots = self._penalised(rows)
        if where is None:
            return
        indices = rows[where.cpu().numpy()]
        counts = self.state.counts.output_counts.index_select(0, slots)
        seen = (counts > 0).logical_or_(self.state.counts.in_prompt.index_select(0, slots))
        values = logits.index_select(0, where)
        repetition = self._column(self.state.repetition, indices)
        values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
        values -= self._column(self.state.presence, indices) * (counts > 0)
        values -= self._column(self.state.frequency, indices) * counts
        logits.index_copy_(0, where, values)

    def _bias(self, logits: torch.Tensor, rows: Int32Array) -> None:
        for at, index in enumerate(rows.tolist()):
            row = self.state[index]
            if row.bias_ids is not None:
                logits[at].index_add_(0, row.bias_ids, row.bias_values)
            if row.end_ids is not None and self.state.output_len[index] < self.state.min_new_tokens[index]:
                logits[at].index_fill_(0, row.end_ids, -torch.inf)

    def _draw(self, logits: torch.Tensor, largest: torch.Tensor, rows: Int32Array) -> torch.Tensor:
        """(N,) int64 ids for N rows whose temperature isn't 0."""
        state = self.state
        z = (logits - largest[:, None]).div_(self._column(state.temperature, rows))
        floor = self._column(np.log(np.maximum(state.min_p[rows], np.float32(1e-45)))).clamp_(min=_NO_HOPE).squeeze(1)
        filtered = np.flatnonzero((state.top_k[rows] < state.vocab_size) | (state.top_p[rows] < 1))
        if len(filtered):
            chosen = self._tensor(filtered)
            cut = _top_floor(z.index_select(0, chosen), state.top_k[rows[filtered]], state.top_p[rows[filtered]])
            floor = floor.index_copy(0, chosen, torch.maximum(floor.index_select(0, chosen), cut))
        return self._noisiest(z, floor, rows)

    def _noisiest(self, z: torch.Tensor, floor: torch.Tensor, rows: Int32Array) -> torch.Tensor:
        """(N,) int64: of the candidates at or above its row's floor, the one with the largest z + noise. Other blocks get no noise."""
        count, vocab_size = z.shape
        spare = -vocab_size % 4
        if spare:
            z = torch.nn.functional.pad(z, (0, spare), value=-torch.inf)
        z = z.masked_fill(z < floor[:, None], -torch.inf).view(count, -1, 4)
        row, block = (z > -torch.inf).any(dim=2).nonzero(as_tuple=True)
        seeds = self.state.seed[rows]
        low = self._tensor((seeds & np.uint64(0xFFFFFFFF)).astype(np.int64))
        high = self._tensor((seeds >> np.uint64(32)).astype(np.int64))
        index = self._tensor(self.state.output_len[rows])
        best, lane = [], []
        for some_rows, some_blocks in zip(row.split(_BLOCKS), block.split(_BLOCKS), strict=True):
            score = z[some_rows, some_blocks] + block_noise(low[some_rows], high[some_rows], index[some_rows], some_blocks)
            block_best, block_lane = score.max(dim=1)
            best.append(block_best)
            lane.append(block_lane)
        scores, candidates = torch.cat(best), torch.cat(lane) + 4 * block
        winning = scores.new_full((count,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
        tied = torch.where(scores == winning[row], candidates, vocab_size)
        # A row without a finite maximum has no candidate, and any valid id will do.
        return torch.full_like(index, vocab_size).scatter_reduce_(0, row, tied, "amin").remainder_(vocab_size)

    def _advance(self, ids: torch.Tensor, rows: Int32Array) -> None:
        self.state.output_len[rows] += 1
        if self.state.is_plain[rows].all():
            return
        where, slots = self._penalised(rows)
        if where is not None:
            self.state.counts.output_counts[slots, ids.index_select(0, where)] += 1

    def _penalised(self, rows: Int32Array) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which of `rows` have penalties, and their rows of `PenaltyCounts`."""
        found = [(at, slot) for at, index in enumerate(rows.tolist()) if (slot := self.state[index].penalty_slot) is not None]
        if not found:
            return None, None
        both = self._tensor(np.array(found, dtype=np.int64))
        return both[:, 0], both[:, 1]

    def _column(self, values: NDArray[np.float32], rows: Int32Array | None = None) -> torch.Tensor:
        return torch.from_numpy(values if rows is None else values[rows]).to(self._device)[:, None]

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _top_floor(z: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> torch.Tensor:
    """(N,): the smallest z that top_k and top_p keep, for z (N, vocab) whose largest is 0."""
    vocab_size = z.shape[1]
    limited = top_k[top_k < vocab_size]
    wanted = max(int(limited.max()) if len(limited) else 1, _TOP if (top_p < 1).any() else 1)
    k = torch.from_numpy(top_k).to(z.device)
    p = torch.from_numpy(top_p).to(z.device)
    wanted = min(wanted, vocab_size)
    values = z.topk(wanted, dim=1).values
    floor, enough = _floor_of(values, z, k, p)
    lacking = (~enough).nonzero().squeeze(1)
    if len(lacking):
        rest = z.index_select(0, lacking)
        floor = floor.index_copy(0, lacking, _floor_of(rest.sort(dim=1, descending=True).values, rest, k[lacking], p[lacking])[0])
    return floor


def _floor_of(values: torch.Tensor, z: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The floor, given each row's largest `values` (N, W) in descending order, and whether W were enough to tell."""
    width, vocab_size = values.shape[1], z.shape[1]
    last = values.gather(1, (k.clamp(max=width) - 1)[:, None])
    k_floor = torch.where(k < vocab_size, last[:, 0], -torch.inf)
    mass = z.exp().masked_fill_(z < k_floor[:, None], 0).sum(dim=1)
    weights = values.exp().masked_fill_(values < k_floor[:, None], 0)
    reached = weights.cumsum(dim=1)
    likelier = reached - weights < (p * mass)[:, None]
    kept = (likelier & (weights > 0)).sum(dim=1)
    p_floor = values.gather(1, (kept.clamp(min=1) - 1)[:, None])[:, 0]
    enough = (p >= 1) | (width == vocab_size) | (reached[:, -1] >= p * mass) | (values[:, -1] < k_floor)
    return torch.where(p < 1, torch.maximum(k_floor, p_floor), k_floor), enough
