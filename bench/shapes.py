"""The engine alone on larger models: synthetic weights in known shapes, prompts of 100 to 8,000 tokens, batches of 1 to 64.

    python bench/shapes.py [--shapes NAME …] [--quantizations …] [--isa …] [--prompts N …] [--batches N …] [--rounds N] [--quick]

Drives the native executor as the scheduler does, in one process, with no server around it. Beside each speed stand the bytes and operations
a second that it needs at the least, and their share of the machine's ceilings, measured in the same run. One JSON line per measurement.

Least bytes of a decode step: every weight once (of the embedding nothing, unless it is the head as well) and the KV of every row's context.
Least operations of a token: two per weight of every matrix that it passes, and four per head element and position attended to; the head
only where a token is sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ceilings
from packed import PackedInMemory, pack
from sterna.config.cores import usable_cores
from sterna.config.memory import available_memory_bytes
from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, WANT_NOTHING, WANT_SAMPLE, Executor, ForwardBatch, GroupSlots
from sterna.executor.native.executor import make
from sterna.executor.native.formats import Format, Quantization, format_of
from sterna.models.spec import AttentionSpec, GatedMLPSpec, LayerSpec, ModelSpec, RopeLlama3, RopeSpec, kv_groups, weight_shapes
from sterna.models.weights import WeightEntry
from sterna.protocol.sampling import SamplingParams

PROMPTS = (100, 500, 1000, 2000, 4000, 8000)
BATCHES = (1, 4, 16, 64)
DECODE_CONTEXT = 256
"""Tokens before the ones that are decoded."""
CHUNK = 512
"""Prompt tokens of one step, as the server's default has it."""
BITS = {"none": (16.0, 16.0), "int8": (8.5, 8.5), "int4": (5.0, 8.5)}
"""Of a packed weight, in layers and in embedding and head: bf16; a byte and 1/32 of a float16 scale; a nibble and 1/32 of two (scale and
minimum)."""
SPARE_BYTES = 1_000_000_000
RANDOM_ROWS = 256
"""Of each matrix; the others repeat them. Whole blocks of the packed layout."""


def _llama(sizes: tuple[int, int, int, int, int, int, int], rope: RopeSpec, eps: float, *, tied: bool, qk_norm: bool = False) -> ModelSpec:
    """`sizes`: layers, hidden, intermediate, heads, KV heads, head width, vocabulary."""
    layers, hidden, inner, heads, kv_heads, width, vocab = sizes
    mixer = AttentionSpec(heads, kv_heads, width, width**-0.5, rope, qk_norm="head" if qk_norm else None)
    every = (LayerSpec(mixer, GatedMLPSpec(inner), eps),) * layers
    return ModelSpec(vocab, hidden, every, kv_groups(every), eps, tied_head=tied)


LLAMA3_ROPE = RopeLlama3(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
SHAPES = {
    "Qwen3-0.6B": _llama((28, 1024, 3072, 16, 8, 128, 151936), RopeSpec(1e6, 128), 1e-6, tied=True, qk_norm=True),
    "Llama-3.2-1B": _llama((16, 2048, 8192, 32, 8, 64, 128256), RopeSpec(5e5, 64, LLAMA3_ROPE), 1e-5, tied=True),
    "Llama-3.1-8B": _llama((32, 4096, 14336, 32, 8, 128, 128256), RopeSpec(5e5, 128), 1e-5, tied=False),
}


class Unavailable(Exception):
    """The executor can't be made for this shape here; the message says why."""


class RandomWeights(PackedInMemory):
    """Every weight of a spec, packed: a few rows of normal numbers repeated, for making 8 billion would take longer than measuring."""

    def __init__(self, spec: ModelSpec, quantization: Quantization, threads: int) -> None:
        shapes = weight_shapes(spec)

        def form(name: str) -> Format:
            return format_of(name, WeightEntry("", name, "F32", shapes[name], shapes[name]), quantization)

        super().__init__(spec, form, quantization)
        # A prime length, so that no two of these rows are equal.
        numbers = np.random.default_rng(0).standard_normal(1_000_003, dtype=np.float32)
        for name in self.header.vectors:
            self.vector(name)[:] = 1
        for name, record in self.header.matrices.items():
            values = np.resize(numbers, (min(record.rows, RANDOM_ROWS), record.cols)) * np.float32(record.cols**-0.5)
            few, all_rows = pack(values, form(name), threads), self.matrix_bytes(name)
            whole = len(all_rows) // len(few) * len(few)
            all_rows[:whole].reshape(-1, len(few))[:] = few
            all_rows[whole:] = few[: len(all_rows) - whole]


def make_executor(name: str, quantization: Quantization, slots: int, threads: int) -> Executor:
    """The native executor with room for `slots` tokens. Raises Unavailable where there is too little memory."""
    spec = SHAPES[name]
    work = work_of(spec)
    in_layers, at_ends = BITS[quantization]
    weight_bytes = (work.matrix * in_layers + (work.weights - work.matrix) * at_ends) / 8
    needed = weight_bytes + slots * work.kv_per_token * 2 + SPARE_BYTES
    available = available_memory_bytes()
    if needed > available:
        raise Unavailable(f"needs about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available")
    args = ServerArgs(
        quantization=quantization,
        isa=os.environ.get("STERNA_ISA", "auto"),
        threads=threads,
        max_total_tokens=slots,
        context_length=max(PROMPTS) + 1,
    )
    return make(args, _facts(spec), spec, RandomWeights(spec, quantization, threads))


def _facts(spec: ModelSpec) -> ModelConfig:
    return ModelConfig(
        name="random",
        source="",
        family="llama",
        weights_dtype="F32",
        num_parameters=0,
        vocab_size=spec.vocab_size,
        context_len=131072,
        bos_token_id=None,
        eos_token_ids=(2,),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What one token takes at the least, by part of the model; see the file's head."""

    weights: int
    """Numbers stored."""
    matrix: int
    """Numbers in the matrices of all layers."""
    head: int
    kv_per_token: int
    heads_width: int
    """Query head elements over all layers."""

    def step_bytes(self, rows: int, context: int, bits: tuple[float, float]) -> float:
        """Of a decode step over `rows` rows with `context` tokens before each; `bits` as in `BITS`."""
        return (self.matrix * bits[0] + self.head * bits[1]) / 8 + rows * context * self.kv_per_token * 2

    def operations(self, tokens: int, samples: int, attended: int) -> float:
        """`attended`: positions seen, summed over the tokens."""
        return 2.0 * tokens * self.matrix + 2.0 * samples * self.head + 4.0 * attended * self.heads_width


def work_of(spec: ModelSpec) -> Work:
    matrices = {name: shape[0] * shape[1] for name, shape in weight_shapes(spec).items() if len(shape) == 2}
    return Work(
        weights=sum(matrices.values()),
        matrix=sum(size for name, size in matrices.items() if name.startswith("layers.")),
        head=matrices["embed" if spec.tied_head else "head"],
        kv_per_token=spec.kv_groups[0].elements_per_token,
        heads_width=sum(layer.mixer.num_heads * layer.mixer.head_dim for layer in spec.layers),
    )


class Driver:
    """Rows of equal length over an executor, as a scheduler would keep them: pages in no particular order."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._random = np.random.default_rng(1)
        self._vocab_size = vocab_size
        self._step = 0
        page = executor.info.page_size
        self._order = self._random.permutation(executor.info.num_slots // page)
        """The same at every `start`."""

    def take_memory(self) -> None:
        """Compute a token in the highest page: the engine then has memory for all below (decision 022), and no run waits for it."""
        highest = int(self._order.argmax())
        self._order[[0, highest]] = self._order[[highest, 0]]
        self.start(1, self._executor.info.page_size)
        self.prompt(1, sample=False)

    def start(self, rows: int, length: int) -> None:
        """Room for `rows` rows of `length` tokens; nothing computed yet."""
        page = self._executor.info.page_size
        pages = -(-length // page)
        order = self._order[: rows * pages].reshape(rows, pages, 1)
        self._table = np.ascontiguousarray((order * page + np.arange(page)).reshape(rows, -1).astype(np.int32))
        self._rows, self._length = rows, 0
        for row in range(rows):
            self._executor.release(row)
            self._executor.bind(row, SamplingParams(temperature=0.0), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def prompt(self, tokens: int, *, sample: bool) -> None:
        """`tokens` more of prompt for every row, a chunk of one row at a time, the last of which samples."""
        begin = self._length
        for row in range(self._rows):
            for at in range(begin, begin + tokens, CHUNK):
                end = min(at + CHUNK, begin + tokens)
                ids = self._random.integers(3, self._vocab_size, end - at).astype(np.int32)
                self._submit(ids, np.array([row], dtype=np.int32), at, end, ROLE_PROMPT, sample and end == begin + tokens)
        self._length = begin + tokens

    def decode(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(rows,) ids -> (rows,): one token more for every row."""
        self._length += 1
        return self._submit(ids, np.arange(self._rows, dtype=np.int32), self._length - 1, self._length, ROLE_GENERATED, True)

    def _submit(self, ids: NDArray[np.int32], pool: NDArray[np.int32], begin: int, end: int, role: int, sample: bool) -> NDArray[np.int32]:
        rows = len(pool)
        self._step += 1
        batch = ForwardBatch(
            step=self._step,
            input_ids=ids,
            input_from=None,
            row_splits=np.arange(0, len(ids) + 1, len(ids) // rows, dtype=np.int32),
            prefix_lens=np.full(rows, begin, dtype=np.int32),
            seq_lens=np.full(rows, end, dtype=np.int32),
            req_pool_idx=pool,
            roles=np.full(rows, role, dtype=np.uint8),
            wants=np.full(rows, WANT_SAMPLE if sample else WANT_NOTHING, dtype=np.uint8),
            groups=(GroupSlots(self._table[pool, begin:end].ravel(), self._table),),
        )
        return self._executor.submit(batch).result().token_ids


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure_prompts(driver: Driver, work: Work, lengths: tuple[int, ...], repeat: int) -> Iterator[dict[str, Any]]:
    for length in lengths:
        times = []
        for _ in range(repeat):
            driver.start(1, length)
            times.append(_seconds(lambda length=length: driver.prompt(length, sample=True)))
        seconds = statistics.median(times)
        operations = work.operations(length, 1, length * (length + 1) // 2)
        yield {"prompt_tokens": length, "tok_s": round(length / seconds, 1), "tera_ops_s": operations / seconds / 1e12}


def measure_decodes(
    driver: Driver, work: Work, bits: tuple[float, float], batches: tuple[int, ...], steps: int, repeat: int
) -> Iterator[dict[str, Any]]:
    for rows in batches:
        driver.start(rows, DECODE_CONTEXT + repeat * steps + 1)
        driver.prompt(DECODE_CONTEXT, sample=False)
        ids = driver.decode(np.ones(rows, dtype=np.int32))
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            for _ in range(steps):
                ids = driver.decode(ids)
            times.append((time.perf_counter() - began) / steps)
        seconds, context = statistics.median(times), DECODE_CONTEXT + repeat * steps // 2
        yield {
            "batch": rows,
            "tok_s": round(rows / seconds, 1),
            "step_ms": round(seconds * 1000, 2),
            "gb_s": work.step_bytes(rows, context, bits) / seconds / 1e9,
            "tera_ops_s": work.operations(rows, rows, rows * context) / seconds / 1e12,
        }


def against(line: dict[str, Any], limits: dict[str, Any], quantization: str) -> dict[str, Any]:
    """The line, rounded, with its shares of the ceilings: bytes of the reading speed, operations of the best rate for these weights (with
    the instruction set that is forced, if any)."""
    kind = "bf16_tflops" if quantization == "none" else "int8_tops"
    isa = os.environ.get("STERNA_ISA")
    rate = ceilings.best(limits, kind, isa) or ceilings.best(limits, "fp32_tflops", isa)
    shares = {"gb_s": max(limits["read_gb_s"].values()), "tera_ops_s": rate}
    shown = dict(line)
    for key, limit in shares.items():
        if key in line and limit:
            shown[key] = round(line[key], 3)
            shown[f"{key}_share"] = round(line[key] / limit, 3)
    return shown


def measure(name: str, quantization: Quantization, limits: dict[str, Any], plan: argparse.Namespace) -> None:
    """All of one shape, printed line by line."""
    head = {"shape": name, "quantization": quantization, "isa": os.environ.get("STERNA_ISA", "auto"), "rounds": plan.rounds}
    lengths, batches, steps, repeat = tuple(plan.prompts), tuple(plan.batches), plan.steps, plan.rounds
    slots = max([length + 64 for length in lengths] + [rows * (DECODE_CONTEXT + repeat * steps + 64) for rows in batches])
    try:
        executor = make_executor(name, quantization, slots, plan.threads)
    except Unavailable as fault:
        print(json.dumps({**head, "skipped": str(fault)}), flush=True)
        return
    try:
        spec = SHAPES[name]
        driver, work = Driver(executor, spec.vocab_size), work_of(spec)
        driver.take_memory()
        for line in measure_prompts(driver, work, lengths, repeat):
            print(json.dumps({**head, **against(line, limits, quantization)}), flush=True)
        for line in measure_decodes(driver, work, BITS[quantization], batches, steps, repeat):
            print(json.dumps({**head, **against(line, limits, quantization)}), flush=True)
    finally:
        executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--quantizations", nargs="+", choices=BITS, default=["int4", "none"])
    parser.add_argument("--isa", nargs="+", default=[], help="run once with each as STERNA_ISA, each in a process of its own")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--prompts", nargs="*", type=int, default=list(PROMPTS), help="lengths, in tokens")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES), help="rows that decode")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is told")
    parser.add_argument("--steps", type=int, default=16, help="of a round of decoding")
    parser.add_argument("--quick", action="store_true", help="two lengths, two batches, one short round: to try the harness with")
    options = parser.parse_args()
    if options.isa:
        words = [f"--{name}={getattr(options, name)}" for name in ("threads", "rounds", "steps")]
        for name in ("shapes", "quantizations", "prompts", "batches"):
            words += [f"--{name}", *map(str, getattr(options, name))]
        words += ["--quick"] if options.quick else []
        for isa in options.isa:
            subprocess.run([sys.executable, __file__, *words], check=True, env={**os.environ, "STERNA_ISA": isa})
        return
    if options.quick:
        options.prompts, options.batches, options.steps, options.rounds = list(PROMPTS[:2]), list(BATCHES[:2]), 2, 1
    limits = ceilings.measure(options.threads)
    print(json.dumps({"ceilings": limits}), flush=True)
    for name in options.shapes:
        for quantization in options.quantizations:
            measure(name, quantization, limits, options)


if __name__ == "__main__":
    main()
