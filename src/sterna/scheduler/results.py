"""`StepOutput` → `Req`: every row's token is taken in, and whoever ends by it is found.

Most rows of a step get a token that ends nothing. Those are found for the whole batch at once; only the others, and those that ask for
logprobs, are looked at one by one. What a step gives to somebody who ended while it was in flight counts nowhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sterna.executor.base import STATUS_OK, StepOutput
from sterna.mem_cache.allocator import Int32Array
from sterna.protocol.finish import FAULT, FinishReason
from sterna.protocol.generate import SchedulerMark
from sterna.protocol.logprobs import TokenLogprobs
from sterna.scheduler.batch import PrefillChunk, ScheduleBatch
from sterna.scheduler.decode import Decodes, RunningBatch
from sterna.scheduler.finish import INVALID_LOGITS, check_finished
from sterna.scheduler.flight import InFlight
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.req import Req, ReqState

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepResult:
    due: list[Req] = field(default_factory=list)
    """Have output to send, and go on."""
    finished: list[tuple[Req, FinishReason]] = field(default_factory=list)
    sampled: list[Req] = field(default_factory=list)
    """Have their first token after a prefill and go on: they join the running batch."""
    num_tokens: int = 0
    """Output tokens made."""

    def add(self, other: StepResult) -> None:
        """`other` came of other rows."""
        self.due += other.due
        self.finished += other.finished
        self.sampled += other.sampled
        self.num_tokens += other.num_tokens


@dataclass(slots=True, frozen=True)
class RowTokens:
    """A `StepOutput`, checked."""

    tokens: Int32Array
    """(rows,): -1 where a row has none."""
    ok: NDArray[np.bool_]
    """(rows,): `STATUS_OK`."""
    logprobs: Sequence[TokenLogprobs | None]
    """(rows,), or () where no row asked for them."""

    def logprobs_of(self, row: int) -> TokenLogprobs | None:
        return self.logprobs[row] if self.logprobs else None


class RowToken(NamedTuple):
    """One row of `RowTokens`."""

    token: int
    """-1 where it has none."""
    ok: bool
    """Whether it is to be trusted."""
    logprobs: TokenLogprobs | None


class ResultTaker:
    def __init__(self, ledger: KVLedger, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_eos = np.zeros(vocab_size, dtype=np.bool_)
        self._is_eos[[token for token in eos_token_ids if token < vocab_size]] = True

    def take(self, batch: ScheduleBatch, running: RunningBatch, made: RowTokens, in_flight: InFlight, now: float) -> StepResult:
        """Advance every row of `batch`, which has landed."""
        tokens = made.tokens
        valid = made.ok & (tokens < self._vocab_size)
        result = StepResult()
        n = len(batch.decodes)
        if n:
            self._take_decodes(batch.decodes, running, made, _alive(batch.decodes, valid[:n], in_flight), result, now)
            if self._ledger.pools.windows:
                self._free_behind(batch.decodes)
        for row, chunk, token, ok in zip(range(n, len(tokens)), batch.chunks, tokens[n:].tolist(), valid[n:].tolist(), strict=True):
            if chunk.req.state is ReqState.FINISHED:
                continue
            try:
                self._take_chunk(chunk, RowToken(token, ok, made.logprobs_of(row)), in_flight, result, now)
            except Exception:
                log.exception("%s: its result could not be handled", chunk.req.rid)
                result.finished.append((chunk.req, FAULT))
        return result

    def _take_decodes(
        self, decodes: Decodes, running: RunningBatch, made: RowTokens, valid: NDArray[np.bool_], result: StepResult, now: float
    ) -> None:
        n = len(decodes)
        tokens = made.tokens[:n]
        valid = valid & (tokens >= 0)
        running.last_token[decodes.rows] = tokens
        look = ~valid | decodes.look
        look |= self._is_eos[np.where(valid, tokens, 0)]
        due = result.due
        # One flat tuple, which zip uses again: a step of many rows pays for each allocation here.
        for row, req, token, look_at, ok in zip(range(n), decodes.reqs, tokens.tolist(), look.tolist(), valid.tolist(), strict=True):
            if look_at:
                self._look(req, RowToken(token, ok, made.logprobs_of(row)), result, now)
                continue
            output_ids = req.output_ids
            output_ids.append(token)
            req.last_token_time = now
            if len(output_ids) - req.num_sent >= req.output_interval:
                due.append(req)
        result.num_tokens += int(valid.sum())

    def _free_behind(self, decodes: Decodes) -> None:
        """Rows that have filled a page may have left another behind their windows. Who has ended gives back all at once."""
        lengths = decodes.positions + 1
        filled = np.flatnonzero(lengths % self._ledger.page_size == 0).tolist()
        alive = [i for i in filled if decodes.reqs[i].state is not ReqState.FINISHED]
        if alive:
            self._ledger.free_behind([decodes.reqs[i] for i in alive], lengths[alive].tolist())

    def _look(self, req: Req, got: RowToken, result: StepResult, now: float) -> None:
        """A row that may end here, or has ended before; a fault in its handling ends it and nobody else."""
        if req.state is ReqState.FINISHED:
            return
        try:
            reason = self._take_token(req, got, now)
        except Exception:
            log.exception("%s: its token could not be handled", req.rid)
            reason = FAULT
        if reason is not None:
            result.finished.append((req, reason))
        elif len(req.output_ids) - req.num_sent >= req.output_interval:
            result.due.append(req)

    def _take_token(self, req: Req, got: RowToken, now: float) -> FinishReason | None:
        if not got.ok:
            return INVALID_LOGITS
        if req.sampling_params.return_logprob:
            if got.logprobs is None:
                raise ValueError("the executor gave no logprobs")
            req.unsent_logprobs.append(got.logprobs)
        req.output_ids.append(got.token)
        req.last_token_time = now
        if req.first_token_time is None:
            req.first_token_time = now
        return check_finished(req, self._eos_token_ids)

    def _take_chunk(self, chunk: PrefillChunk, got: RowToken, in_flight: InFlight, result: StepResult, now: float) -> None:
        req = chunk.req
        if not got.ok or (chunk.is_last and got.token < 0):
            # What it computed isn't to be trusted: `kv_len` stays, so that none of it reaches the cache.
            result.finished.append((req, INVALID_LOGITS))
            return
        is_last = chunk.is_last
        req.kv_len = chunk.end
        req.chunks += 1
        req.mark(SchedulerMark(now, "chunk", chunk.end))
        if chunk.begins_in_copy:
            self._ledger.end_copy(req)
        self._ledger.cache_computed(req, in_flight=in_flight.uses(req))
        self._ledger.free_behind([req], [chunk.end])
        if not is_last:
            return
        result.num_tokens += 1
        reason = self._take_token(req, got, now)
        if reason is not None:
            result.finished.append((req, reason))
            return
        result.sampled.append(req)
        if not req.opened or len(req.output_ids) - req.num_sent >= req.output_interval:
            result.due.append(req)


def _alive(decodes: Decodes, valid: NDArray[np.bool_], in_flight: InFlight) -> NDArray[np.bool_]:
    """(decodes,): whose `valid` token is wanted: those who haven't ended."""
    if not in_flight.departing:
        return valid
    alive: NDArray[np.bool_] = np.array([req.state is not ReqState.FINISHED for req in decodes.reqs])
    return valid & alive


def tokens_by_row(output: StepOutput, num_rows: int) -> RowTokens:
    """Raises ValueError where `output` isn't that of a step of `num_rows` rows which ask for a token at most."""
    splits = output.row_splits
    if len(splits) != num_rows + 1 or len(output.status) != num_rows:
        raise ValueError(f"a step of {num_rows} rows gave {len(splits) - 1}")
    ok = output.status == STATUS_OK
    logprobs = output.logprobs or ()
    if logprobs and len(logprobs) != len(output.token_ids):
        raise ValueError(f"a step gave {len(output.token_ids)} tokens and logprobs of {len(logprobs)}")
    if len(output.token_ids) == num_rows and splits[-1] == num_rows:
        return RowTokens(output.token_ids, ok, logprobs)
    counts = np.diff(splits)
    if counts.max(initial=0) > 1:
        raise ValueError("a row gave more tokens than it was asked for")
    tokens = np.full(num_rows, -1, dtype=np.int32)
    tokens[counts == 1] = output.token_ids
    if logprobs:
        each = iter(logprobs)
        logprobs = [next(each) if count else None for count in counts.tolist()]
    return RowTokens(tokens, ok, logprobs)
