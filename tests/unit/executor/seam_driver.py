"""A scheduler reduced to what tests of the seam itself need: any executor, whole requests, everything that comes back of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, Executor, ForwardBatch, GroupSlots, StepHandle
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams


@dataclass(eq=False)
class Row:
    """One request."""

    index: int
    prompt: list[int]
    output: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One per token that came back."""
    computed: int = 0
    unread: int = 0
    """Tokens that are sampled and not read yet."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class SeamDriver:
    """Row i's position p lies in slot i * room + p of every KV group."""

    def __init__(self, executor: Executor, *, room: int = 128) -> None:
        self.executor = executor
        self._room = room
        rows = min(executor.info.group_slots) // room
        self._table = np.arange(rows * room, dtype=np.int32).reshape(rows, room)
        self._rows: list[Row] = []
        self._last: dict[Row, int] = {}
        """Where each row that sampled stood in the last step."""
        self.steps = 0
        self.steps_on_top = 0
        """Submitted before the one before it was read."""
        self.told_nothing = 0
        """Steps of which no row was told of logprobs."""

    def add(self, prompt: Sequence[int], params: SamplingParams, output: Sequence[int] = ()) -> Row:
        row = Row(len(self._rows), list(prompt), list(output))
        self._rows.append(row)
        self.executor.bind(row.index, params, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
        return row

    def run(self, *rows: Row, tokens: int, chunk: int = 1 << 30, overlap: bool = False) -> None:
        """Until each of `rows` has `tokens` of output or more. `overlap`: a step is submitted before the one before it is read."""
        unread: list[tuple[StepHandle, list[Row]]] = []
        while any(len(row.output) < tokens for row in rows):
            self.steps_on_top += bool(unread)
            unread.append(self._submit(rows, chunk))
            if len(unread) > overlap:
                self._read(*unread.pop(0))
        for step in unread:
            self._read(*step)

    def _submit(self, rows: Sequence[Row], chunk: int) -> tuple[StepHandle, list[Row]]:
        ids: list[int] = []
        prefix, lengths, roles, wants, sources = [], [], [], [], []
        last, self._last = self._last, {}
        for at, row in enumerate(rows):
            sources.append(last[row] if row.computed == len(row.tokens) else -1)
            end = min(row.computed + chunk, len(row.prompt) if row.computed < len(row.prompt) else len(row.tokens) + row.unread)
            ids += [0] if sources[-1] >= 0 else row.tokens[row.computed : end]
            prefix.append(row.computed)
            lengths.append(end - row.computed)
            roles.append(ROLE_PROMPT if row.computed < len(row.prompt) else ROLE_GENERATED)
            row.computed = end
            wants.append(end == len(row.tokens) + row.unread)
            if wants[-1]:
                row.unread += 1
                self._last[row] = at
        indices = np.array([row.index for row in rows], dtype=np.int32)
        starts = np.array(prefix, dtype=np.int32)
        places = [self._table[row.index, start : start + length] for row, start, length in zip(rows, prefix, lengths, strict=True)]
        batch = ForwardBatch(
            step=self.steps,
            input_ids=np.array(ids, dtype=np.int32),
            input_from=np.array(sources, dtype=np.int32) if max(sources) >= 0 else None,
            row_splits=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            prefix_lens=starts,
            seq_lens=(starts + lengths).astype(np.int32),
            req_pool_idx=indices,
            roles=np.array(roles, dtype=np.uint8),
            wants=np.array(wants, dtype=np.uint8),
            groups=tuple(GroupSlots(np.concatenate(places), self._table) for _ in self.executor.info.group_slots),
        )
        self.steps += 1
        return self.executor.submit(batch), list(rows)

    def _read(self, handle: StepHandle, rows: Sequence[Row]) -> None:
        result = handle.result()
        told = result.logprobs
        self.told_nothing += told is None
        assert told is None or len(told) == len(result.token_ids)
        for at, row in enumerate(rows):
            for place in range(result.row_splits[at], result.row_splits[at + 1]):
                row.output.append(int(result.token_ids[place]))
                row.logprobs.append(None if told is None else told[place])
                row.unread -= 1
