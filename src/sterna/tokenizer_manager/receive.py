"""Hop 8: a `StrRow` is folded into its `ReqState`, and whoever waits for it is woken."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from sterna.protocol.control import SchedulingStarted
from sterna.protocol.finish import FinishAbort
from sterna.protocol.generate import StrRow
from sterna.tokenizer_manager.req_state import ReqState

ITL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)


class JournalGap(Exception):
    """A row begins after the journal's end, or lacks logprobs: output was lost between the processes."""


@dataclass(slots=True)
class InterTokenLatency:
    """A histogram of seconds per output token; bucket i counts what is at most `ITL_BOUNDS_S[i]`, the last one the rest.

    Kept here and not in a metrics library because it is touched once per output row.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(ITL_BOUNDS_S) + 1))
    total_s: float = 0.0
    count: int = 0

    def observe(self, seconds: float, tokens: int) -> None:
        """`tokens` arrived together, `seconds` after the ones before."""
        self.buckets[bisect_left(ITL_BOUNDS_S, seconds / tokens)] += tokens
        self.total_s += seconds
        self.count += tokens


def fold(state: ReqState, row: StrRow, epoch: int, detokenized_time: float, now: float, itl: InterTokenLatency) -> bool:
    """Append `row` to the journal; False where it is stale (another epoch, seen already, or after the end) and was dropped.

    Raises JournalGap where tokens are missing before it, or logprobs in it.
    """
    have = len(state.output_ids)
    if epoch != state.epoch or state.finished:
        return False
    if row.start > have:
        raise JournalGap(f"{row.rid}: row at {row.start}, journal ends at {have}")
    if row.start < have:
        # Rows aren't cut: text can't be split by token. A resumed stream repeats whole rows or none.
        if row.start + len(row.output_ids) > have:
            raise JournalGap(f"{row.rid}: row at {row.start} overlaps a journal that ends at {have}")
        if row.finished_reason is None:
            return False
    elif row.output_ids:
        if state.wants_logprobs:
            logprobs = row.logprobs or []
            if len(logprobs) != len(row.output_ids):
                raise JournalGap(f"{row.rid}: {len(row.output_ids)} tokens with {len(logprobs)} logprobs")
            state.logprobs += logprobs
        state.output_ids += row.output_ids
        if state.last_row_time is not None:
            itl.observe(now - state.last_row_time, len(row.output_ids))
        else:
            state.admission.begin(now)  # where the row was faster than the word of its beginning
        state.last_row_time = now
    state.text_chunks.append(row.output_str)
    if not have:  # what a resumed request finds in the cache is its own doing
        state.prompt_tokens = row.prompt_tokens
        state.cached_tokens = row.cached_tokens
    if row.finished_reason is not None:
        state.finished_reason = row.finished_reason
        state.times.detokenized = detokenized_time
    if row.times is not None:
        state.times.take(row.times)
    state.event.set()
    return True


def note_started(states: Mapping[str, ReqState], message: SchedulingStarted) -> None:
    """Of `states`, those that the scheduler has begun."""
    for rid in message.rids:
        state = states.get(rid)
        if state is not None and state.epoch == message.epoch:
            state.times.first_scheduled = state.times.first_scheduled or message.time
            state.admission.begin(message.time)


def end_locally(state: ReqState, reason: FinishAbort) -> None:
    """End a journal that no terminal row will end: its process is dead, or its output was lost."""
    if not state.finished:
        state.finished_reason = reason
        state.text_chunks.append("")
        state.event.set()
