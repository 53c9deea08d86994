"""A scheduler reduced to what the engine's tests need, and tiny models packed in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.formats import Format
from sterna.executor.native.packed_file import ALIGNMENT, MatrixRecord, PackedHeader, VectorRecord, align
from sterna.executor.native.plan import engine_config
from sterna.models.spec import ModelSpec, weight_shapes

CONTEXT = 1024
PAGE = 16
POOL = 64
BF16, INT8, INT4 = Format(2, False, False, 32), Format(1, False, False, 32), Format(0, True, False, 32)


class MemoryWeights:
    """A spec's weights, packed from float32 arrays: what `PackedModel` offers, without a file."""

    def __init__(self, spec: ModelSpec, float32: Callable[[str], NDArray[np.float32]], form: Callable[[str], Format]) -> None:
        matrices: dict[str, MatrixRecord] = {}
        vectors: dict[str, VectorRecord] = {}
        offset = 0
        for name, shape in weight_shapes(spec).items():
            if len(shape) == 1:
                vectors[name] = VectorRecord(offset, shape[0])
                nbytes = 4 * shape[0]
            else:
                nbytes = _native.matrix_bytes(form(name), *shape)
                matrices[name] = MatrixRecord(*form(name), *shape, offset, nbytes)
            offset = align(offset + nbytes, ALIGNMENT)
        self.header = PackedHeader("none", offset, matrices, vectors)
        room = np.zeros(offset + ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self._data = room[start : start + offset]
        for name, vector in vectors.items():
            self._data[vector.offset : vector.offset + 4 * vector.count] = float32(name).view(np.uint8)
        for name, record in matrices.items():
            rows = np.ascontiguousarray(float32(name)).view(np.uint8)
            packed = self._data[record.offset : record.offset + record.nbytes]
            assert _native.pack_rows("F32", form(name), record.cols, rows, packed, 1) is None

    def matrix_bytes(self, name: str) -> NDArray[np.uint8]:
        record = self.header.matrices[name]
        return self._data[record.offset : record.offset + record.nbytes]

    def vector(self, name: str) -> NDArray[np.float32]:
        record = self.header.vectors[name]
        return self._data[record.offset : record.offset + 4 * record.count].view(np.float32)


def make_engine(spec: ModelSpec, weights: MemoryWeights, *, isa: str | None = None, threads: int = 1, slots: int = 8192) -> _native.Engine:
    config = engine_config(spec, weights)
    return _native.Engine(config, [slots] * len(spec.kv_groups), threads, isa or _native.available_isas()[0])


@dataclass(eq=False)
class Row:
    """One request, and for each of its output tokens all the vocabulary's logprobs."""

    index: int
    prompt: list[int]
    pages: list[list[int]]
    """Per group."""
    computed: int = 0
    shared_pages: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    was_nan: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Pages are handed out in random order, and filled with NaN when they come back."""

    def __init__(self, engine: _native.Engine, spec: ModelSpec, *, slots: int = 8192, seed: int = 0) -> None:
        self.engine = engine
        self.spec = spec
        self.rng = np.random.default_rng(seed)
        self.free = [[int(page) for page in self.rng.permutation(slots // PAGE)] for _ in spec.kv_groups]
        self.tables = [np.zeros((POOL, CONTEXT), dtype=np.int32) for _ in spec.kv_groups]
        self.steps = 0
        self.rows: list[Row] = []
        self.copies: list[list[tuple[int, int]]] = [[] for _ in spec.kv_groups]
        """Per group, first slots from and to: what the next step copies."""
        for group in range(len(spec.kv_groups)):
            for page in self.free[group]:
                engine.fill_page(group, page, 0xFF)

    def add(
        self,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        prefix_of: Row | None = None,
        seed: int | None = None,
        copy: bool = False,
    ) -> Row:
        """`prefix_of`: start on the whole pages of that row's computed prompt; with `copy` within the next one. `seed`: sample at
        temperature 1; greedy without."""
        taken = {row.index for row in self.rows}
        row = Row(next(i for i in range(POOL) if i not in taken), list(prompt), [[] for _ in self.spec.kv_groups], output=list(output))
        if prefix_of is not None:
            common = next(
                (i for i, (a, b) in enumerate(zip(prompt, prefix_of.prompt, strict=False)) if a != b),
                min(len(prompt), len(prefix_of.prompt)),
            )
            row.shared_pages = min(common, prefix_of.computed, len(prompt) - 1) // PAGE
            row.computed = row.shared_pages * PAGE
            for group, pages in enumerate(row.pages):
                pages += prefix_of.pages[group][: row.shared_pages]
                for p, page in enumerate(pages):
                    self.tables[group][row.index, p * PAGE : (p + 1) * PAGE] = np.arange(page * PAGE, (page + 1) * PAGE)
            if copy:
                row.computed = min(common, prefix_of.computed, len(prompt) - 1)
                self._grow(row, row.computed)
                for group, copies in enumerate(self.copies):
                    copies.append((prefix_of.pages[group][row.shared_pages] * PAGE, row.pages[group][row.shared_pages] * PAGE))
        self.rows.append(row)
        options = _native.SamplingOptions()
        options.temperature = 0.0 if seed is None else 1.0
        options.seed = seed or 0
        options.top_logprobs = self.spec.vocab_size
        self.engine.bind(row.index, options, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
        return row

    def remove(self, row: Row) -> None:
        self.rows.remove(row)
        self.engine.release(row.index)
        for group, pages in enumerate(row.pages):
            for page in pages[row.shared_pages :]:
                self.engine.fill_page(group, page, 0xFF)
                self.free[group].append(page)

    def submit(self, chunks: Sequence[tuple[Row, int]], *, from_last: dict[int, int] | None = None) -> int:
        """One step: `count` more tokens of each row; a row whose tokens are then all computed samples. Returns its number.

        `from_last` maps a row's place in `chunks` to the place in the last step whose token it takes, unread.
        """
        counts = [count for _, count in chunks]
        splits = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        prefix = np.array([row.computed for row, _ in chunks], dtype=np.int32)
        sources = np.full(len(chunks), -1, dtype=np.int32)
        ids: list[int] = []
        wants = []
        for at, (row, count) in enumerate(chunks):
            self._grow(row, row.computed + count)
            unread = from_last is not None and at in from_last
            if unread and from_last is not None:
                sources[at] = from_last[at]
            ids += [0] if unread else row.tokens[row.computed : row.computed + count]
            row.computed += count
            wants.append(unread or row.computed == len(row.tokens))
        self.steps += 1
        rows = np.repeat([row.index for row, _ in chunks], counts)
        positions = np.concatenate([np.arange(start, start + count) for start, count in zip(prefix, counts, strict=True)])
        self.engine.submit(
            self.steps,
            np.array(ids, dtype=np.int32),
            sources if from_last is not None else None,
            splits,
            prefix,
            prefix + np.diff(splits).astype(np.int32),
            np.array([row.index for row, _ in chunks], dtype=np.int32),
            np.array(wants, dtype=np.uint8),
            [
                (table, table[rows, positions], *np.array(copies, dtype=np.int32).reshape(-1, 2).T.copy())
                for table, copies in zip(self.tables, self.copies, strict=True)
            ],
        )
        for copies in self.copies:
            copies.clear()
        return self.steps

    def take(self, step: int, chunks: Sequence[tuple[Row, int]]) -> None:
        tokens, is_nan, logprobs = self.engine.wait(step)
        for at, (row, _) in enumerate(chunks):
            row.was_nan = row.was_nan or bool(is_nan[at])
            token = int(tokens[at])
            if token < 0:
                continue
            chosen, ids, values, _ = logprobs[at]
            by_id = np.empty(self.spec.vocab_size, dtype=np.float32)
            by_id[np.frombuffer(ids, np.int32)] = np.frombuffer(values, np.float32)
            assert by_id[token] == chosen
            row.output.append(token)
            row.logprobs.append(by_id)

    def step(self, chunks: Sequence[tuple[Row, int]]) -> None:
        self.take(self.submit(chunks), chunks)

    def run(self, row: Row, tokens: int, *, chunk: int = 1 << 30, beside: Sequence[Row] = ()) -> Row:
        """Until `row` has `tokens` more output tokens; rows `beside` it generate along."""
        goal = len(row.output) + tokens
        while len(row.output) < goal:
            others = [(other, len(other.tokens) - other.computed) for other in beside]
            self.step([*others[: len(others) // 2], (row, min(chunk, len(row.tokens) - row.computed)), *others[len(others) // 2 :]])
        return row

    def _grow(self, row: Row, length: int) -> None:
        for group, pages in enumerate(row.pages):
            while len(pages) * PAGE < length:
                page = self.free[group].pop()
                start = len(pages) * PAGE
                self.tables[group][row.index, start : start + PAGE] = np.arange(page * PAGE, (page + 1) * PAGE)
                pages.append(page)
