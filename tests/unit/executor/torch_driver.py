"""A scheduler reduced to what the executor's tests need: it hands out slots, builds batches and keeps what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

import tiny_models
from model_facts import model_facts
from sterna.config.server_args import ServerArgs
from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, WANT_NOTHING, WANT_SAMPLE, ForwardBatch, GroupSlots, StepHandle
from sterna.executor.torch.executor import TorchExecutor, make
from sterna.models.registry import load_family
from sterna.models.spec import ModelSpec
from sterna.protocol.sampling import SamplingParams

CONTEXT = 512
GREEDY = SamplingParams(temperature=0.0)


class TinyWeights:
    """A tiny model's tensors by canonical name: what `WeightStore` gives, without files."""

    def __init__(self, variant: str) -> None:
        self.family = load_family(tiny_models.VARIANTS[variant].family)
        self.stored = tiny_models.weights(variant)

    def float32(self, name: str) -> NDArray[np.float32]:
        return self.stored[self.family.hf_name(name)]


def tiny_spec(variant: str, context_len: int = CONTEXT) -> ModelSpec:
    weights = TinyWeights(variant)
    shapes = {name: values.shape for name, values in weights.stored.items()}
    return weights.family.spec_from_hf(tiny_models.VARIANTS[variant].config, shapes, context_len=context_len)


def tiny_executor(variant: str = "llama", *, weights: TinyWeights | None = None, untied: bool = False, **changes: object) -> TorchExecutor:
    """`untied`: `weights` has a head of its own, whatever the variant says."""
    settings: dict[str, object] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 4096, "context_length": CONTEXT}
    spec = tiny_spec(variant)
    if untied:
        spec = msgspec.structs.replace(spec, tied_head=False)
    config = model_facts(
        name=variant,
        family=tiny_models.VARIANTS[variant].family,
        weights_dtype="F32",
        vocab_size=spec.vocab_size,
        context_len=CONTEXT,
        bos_token_id=tiny_models.BOS_ID,
        eos_token_ids=(tiny_models.EOS_ID,),
    )
    return make(ServerArgs(**{**settings, **changes}), config, spec, weights or TinyWeights(variant))


@dataclass(eq=False)
class Row:
    """One request."""

    index: int
    prompt: list[int]
    slots: list[dict[int, int]]
    """Per KV group: position -> slot, of what it holds."""
    computed: int = 0
    output: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Slots are handed out in random order, so that nothing works only because they are consecutive; in a KV group with a window they are
    taken back, and their memory is filled with NaN, as soon as no query to come sees them."""

    def __init__(self, executor: TorchExecutor, *, seed: int = 0) -> None:
        self.executor = executor
        self.rng = np.random.default_rng(seed)
        self.free = [[int(slot) for slot in self.rng.permutation(slots)] for slots in executor.info.group_slots]
        """Per KV group."""
        self.tables = [np.zeros((64, CONTEXT), dtype=np.int32) for _ in self.free]
        self.taken_back = 0
        """Slots in all that fell behind a window."""
        self.steps = 0
        self.rows: list[Row] = []

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY, output: Sequence[int] = ()) -> Row:
        taken = {row.index for row in self.rows}
        row = Row(next(i for i in range(64) if i not in taken), list(prompt), [{} for _ in self.free], output=list(output))
        self.rows.append(row)
        self.executor.bind(row.index, params, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
        return row

    def remove(self, row: Row) -> None:
        self.rows.remove(row)
        self.executor.release(row.index)
        for free, held in zip(self.free, row.slots, strict=True):
            free.extend(held.values())

    def submit(self, chunks: Sequence[tuple[Row, int]], *, from_last: dict[int, int] | None = None) -> StepHandle:
        """One step: `count` more tokens of each row; a row whose tokens are then all computed samples.

        `from_last` maps a row's place in `chunks` to the place in the last step whose token it takes, unread.
        """
        splits = np.concatenate(([0], np.cumsum([count for _, count in chunks]))).astype(np.int32)
        prefix = np.array([row.computed for row, _ in chunks], dtype=np.int32)
        ids, wants, roles = [], [], []
        locations: list[list[int]] = [[] for _ in self.free]
        sources = np.full(len(chunks), -1, dtype=np.int32)
        for at, (row, count) in enumerate(chunks):
            for free, table, held, own in zip(self.free, self.tables, row.slots, locations, strict=True):
                new = [free.pop() for _ in range(count)]
                table[row.index, row.computed : row.computed + count] = new
                held.update(zip(range(row.computed, row.computed + count), new, strict=True))
                own += new
            unread = from_last is not None and at in from_last
            ids += [0] if unread else row.tokens[row.computed : row.computed + count]
            if unread:
                sources[at] = from_last[at]
            roles.append(ROLE_PROMPT if row.computed < len(row.prompt) else ROLE_GENERATED)
            row.computed += count
            wants.append(WANT_SAMPLE if unread or row.computed == len(row.tokens) else WANT_NOTHING)
        self.steps += 1
        batch = ForwardBatch(
            step=self.steps,
            input_ids=np.array(ids, dtype=np.int32),
            input_from=sources if from_last is not None else None,
            row_splits=splits,
            prefix_lens=prefix,
            seq_lens=prefix + np.diff(splits).astype(np.int32),
            req_pool_idx=np.array([row.index for row, _ in chunks], dtype=np.int32),
            roles=np.array(roles, dtype=np.uint8),
            wants=np.array(wants, dtype=np.uint8),
            groups=tuple(GroupSlots(np.array(own, dtype=np.int32), table) for own, table in zip(locations, self.tables, strict=True)),
        )
        return self.executor.submit(batch)

    def step(self, chunks: Sequence[tuple[Row, int]]) -> None:
        """Submit, wait, and append what was sampled."""
        self.read(self.submit(chunks), [row for row, _ in chunks])

    def read(self, handle: StepHandle, rows: Sequence[Row]) -> None:
        result = handle.result()
        assert result.step == self.steps or result.step == self.steps - 1
        for at, row in enumerate(rows):
            row.output += result.token_ids[result.row_splits[at] : result.row_splits[at + 1]].tolist()
            row.statuses.append(int(result.status[at]))
            self._take_back(row, min(row.computed, len(row.tokens) - 1))

    def _take_back(self, row: Row, position: int) -> None:
        """What the query at `position`, the next whose step may not have returned, doesn't see."""
        for group, window in enumerate(self.executor.info.group_windows):
            behind = [at for at in row.slots[group] if window is not None and at <= position - window]
            freed = [row.slots[group].pop(at) for at in behind]
            self.free[group] += freed
            self.taken_back += len(freed)
            self.fill(group, freed, torch.nan)

    def fill(self, group: int, slots: Sequence[int], value: float) -> None:
        with torch.inference_mode():
            for layer in self.executor._model.spec.kv_groups[group].layers:
                self.executor.pool.layers[layer].index_fill_(0, torch.tensor(slots, dtype=torch.int64), value)

    def generate(self, row: Row, tokens: int, *, chunk: int = CONTEXT) -> list[int]:
        """`row` alone, until it has `tokens` of output."""
        while len(row.output) < tokens:
            self.step([(row, min(chunk, len(row.tokens) - row.computed))])
        return row.output


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(3, 336, length)]
