"""How near the native executor is to float32 on the same dequantized weights, teacher-forced: perplexity ratio and share of equal top-1.

    bench/accuracy.py [MODEL] [--tokens 16000] [--window 512] [--bfloat16] [--isa NAME] [--threads N]

The text is Python's own documentation (`pydoc_data.topics`), cut into windows. The reference is the torch executor's model in float32 over
`WeightStore.float32`, a window at a time. The native engine is measured in both roles that a token can have:

- generated: every window is a request whose prompt is its first token; every further token is forced upon the sampler (by its mask of
  allowed tokens) and fed back, all windows in one batch of single-token rows;
- prompt: the beginning of a window in chunks. Each is a forward or more for one figure, so it is asked at a sample of positions only, where
  it must equal the generated role's figures to the bit.

`--bfloat16` measures bfloat16 products: matrices are rounded to bfloat16 first, for the reference too. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pydoc_data.topics
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from packed import PackedInMemory, pack
from sterna.config.cores import usable_cores
from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.executor.base import NO_PAGES, ROLE_PROMPT, WANT_SAMPLE, ForwardBatch, GroupSlots
from sterna.executor.native import _native
from sterna.executor.native.executor import PAGE, NativeExecutor, make
from sterna.executor.native.formats import Format
from sterna.executor.native.pack import open_packed
from sterna.executor.native.packed_file import align
from sterna.executor.torch.kv_pool import KVPool
from sterna.executor.torch.model import TorchModel
from sterna.executor.torch.plan import make_plan
from sterna.files.cache import cache_root
from sterna.models.resolve import resolve_model
from sterna.models.spec import ModelSpec
from sterna.models.weights import WeightStore
from sterna.text.tokenizer import Tokenizer

BFLOAT16 = Format(2, False, False, 32)
PROMPT_SAMPLES = 24
CHUNK = 200
"""Prompt tokens per step in the prompt role: not a divisor of anything else here."""

Int32Array = NDArray[np.int32]


class Figures(NamedTuple):
    """(windows, window - 1): of each token after a window's first."""

    logprobs: NDArray[np.float32]
    """ln of the probability that the model gives the text's token."""
    top: Int32Array
    """The likeliest token."""


class BFloat16Weights(PackedInMemory):
    """A model's dequantized weights with its matrices in bfloat16: packed for the engine, and as float32 for the reference."""

    def __init__(self, store: WeightStore, spec: ModelSpec) -> None:
        super().__init__(spec, lambda _: BFLOAT16)
        self._store = store
        for name in self.header.vectors:
            self.vector(name)[:] = store.float32(name)
        for name in self.header.matrices:
            self.matrix_bytes(name)[:] = pack(store.float32(name), BFLOAT16, usable_cores())

    def float32(self, name: str) -> NDArray[np.float32]:
        values = torch.from_numpy(self._store.float32(name))
        rounded: NDArray[np.float32] = (values if values.ndim == 1 else values.bfloat16().float()).numpy()
        return rounded


def windows_of_text(folder: Path, tokens: int, window: int) -> Int32Array:
    """(windows, window): the text's first tokens, at least so many."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    count = -(-tokens // window)
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    if len(ids) < count * window:
        raise SystemExit(f"the text has {len(ids)} tokens only")
    return np.array(ids[: count * window], dtype=np.int32).reshape(count, window)


def reference(spec: ModelSpec, weights: Any, windows: Int32Array, threads: int) -> Figures:
    torch.set_num_threads(threads)
    count, length = windows.shape
    logprobs, top = np.empty((count, length - 1), np.float32), np.empty((count, length - 1), np.int32)
    slots = np.arange(length, dtype=np.int32)
    groups = tuple(GroupSlots(slots, slots[None]) for _ in spec.kv_groups)
    with torch.inference_mode():
        model = TorchModel(spec, weights, torch.float32, torch.device("cpu"))
        pool = KVPool(spec, (length,) * len(spec.kv_groups), 1, torch.float32, torch.device("cpu"))
        for w, ids in enumerate(windows):
            batch = ForwardBatch(
                step=w,
                input_ids=ids,
                input_from=None,
                row_splits=np.array([0, length], dtype=np.int32),
                prefix_lens=np.zeros(1, dtype=np.int32),
                seq_lens=np.array([length], dtype=np.int32),
                req_pool_idx=np.zeros(1, dtype=np.int32),
                roles=np.full(1, ROLE_PROMPT, dtype=np.uint8),
                wants=np.full(1, WANT_SAMPLE, dtype=np.uint8),
                groups=groups,
            )
            plan = make_plan(batch, tuple(group.window for group in spec.kv_groups), torch.device("cpu"))
            every = dataclasses.replace(plan, sample_tokens=torch.arange(length - 1))
            logits = model.forward(torch.from_numpy(ids.astype(np.int64)), every, pool)
            top[w] = logits.argmax(dim=-1).numpy()
            chosen = logits.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
            logprobs[w] = (chosen.double() - logits.double().logsumexp(dim=-1)).float().numpy()
    return Figures(logprobs, top)


class Native:
    """The native engine over windows that each have a row and slots of their own, and one more row to ask prompts with."""

    def __init__(self, args: ServerArgs, folder: Path, spec: ModelSpec, weights: Any, windows: Int32Array) -> None:
        self.windows = windows
        count, length = windows.shape
        room = align(length, PAGE)
        args = msgspec.structs.replace(args, max_total_tokens=(count + 1) * room, max_running_requests=count + 1)
        # Windowed layers get no room of their own here: every group holds everything.
        args = msgspec.structs.replace(args, chunked_prefill_size=0)
        self.executor: NativeExecutor = make(args, ModelConfig.load(folder), spec, weights)
        self._engine = self.executor.engine
        self._groups, self._vocab_size, self._steps = len(spec.kv_groups), spec.vocab_size, 0
        self._slots = (np.arange(count + 1, dtype=np.int32)[:, None] * room + np.arange(length, dtype=np.int32)).astype(np.int32)
        self._options = _native.SamplingOptions()
        self._options.temperature = 0.0
        self._options.top_logprobs = 1

    def generated(self) -> Figures:
        count, length = self.windows.shape
        figures = Figures(np.empty((count, length - 1), np.float32), np.empty((count, length - 1), np.int32))
        for row in range(count):
            self._bind(row, self.windows[row, :1])
        for at in range(length - 1):
            for row, (chosen, top) in enumerate(self._step(range(count), self.windows[:, at], at, self.windows[:, at + 1])):
                figures.logprobs[row, at], figures.top[row, at] = chosen, top
        return figures

    def prompt(self, window: int, position: int) -> tuple[float, int]:
        """As `generated` has at [window, position], from a prompt that ends there."""
        row, ids = len(self.windows), self.windows[window]
        self._bind(row, ids[: position + 1])
        for start in range(0, position + 1, CHUNK):
            end = min(start + CHUNK, position + 1)
            found = self._step([row], ids[start:end], start, ids[position + 1 : position + 2] if end == position + 1 else None)
        self._engine.release(row)
        return found[0]

    def _bind(self, row: int, prompt: Int32Array) -> None:
        self._engine.bind(row, self._options, np.ascontiguousarray(prompt), np.empty(0, dtype=np.int32))

    def _step(self, rows: Any, ids: Int32Array, prefix: int, forced: Int32Array | None) -> list[tuple[float, int]]:
        """One token of each of several rows, or several of one. `forced`: what each row says next; its logprob, and the likeliest token."""
        rows = np.array(rows, dtype=np.int32)
        each = len(ids) // len(rows)
        for row, token in zip(rows.tolist(), () if forced is None else forced.tolist(), strict=forced is not None):
            allowed = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
            allowed[token // 32] = 1 << (token % 32)
            self._engine.set_mask(row, allowed)
        self._steps += 1
        splits = np.arange(len(rows) + 1, dtype=np.int32) * each
        prefix_lens = np.full(len(rows), prefix, dtype=np.int32)
        wants = np.full(len(rows), forced is not None, dtype=np.uint8)
        written = np.ascontiguousarray(self._slots[rows, prefix : prefix + each].ravel())
        groups = [(self._slots, written, NO_PAGES, NO_PAGES)] * self._groups
        self._engine.submit(self._steps, np.ascontiguousarray(ids), None, splits, prefix_lens, prefix_lens + each, rows, wants, groups)
        tokens, _, logprobs = self._engine.wait(self._steps)
        if forced is None:
            return []
        assert tokens.tolist() == forced.tolist()
        return [(chosen, int(np.frombuffer(top, np.int32)[0])) for chosen, top, *_ in logprobs]


def prompt_differences(native: Native, generated: Figures) -> int:
    """At how many of a sample of positions the prompt role says something else."""
    draw = np.random.RandomState(1)
    found = 0
    for _ in range(PROMPT_SAMPLES):
        window, position = draw.randint(len(native.windows)), draw.randint(generated.top.shape[1])
        logprob, top = native.prompt(window, position)
        found += bool(
            np.float32(logprob).tobytes() != generated.logprobs[window, position].tobytes() or top != generated.top[window, position]
        )
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = resolve_model(args.model, cache_dir=cache_root(), context_length=None)
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ModelSpec)
    store = WeightStore.open(folder)
    windows = windows_of_text(folder, args.tokens, args.window)
    weights: Any = BFloat16Weights(store, spec) if args.bfloat16 else open_packed(folder, cache_root(), "none")
    server_args = ServerArgs(model=args.model, isa=args.isa, threads=args.threads, context_length=args.window)
    native = Native(server_args, folder, spec, weights, windows)
    generated = native.generated()
    differences = prompt_differences(native, generated)
    info = native.executor.info
    native.executor.shutdown()
    exact = reference(spec, weights if args.bfloat16 else store, windows, args.threads or usable_cores())
    surprise = exact.logprobs.astype(np.float64) - generated.logprobs
    return {
        "model": args.model,
        "weights": "BF16" if args.bfloat16 else info.dtype,
        "isa": info.details["isa"],
        "tokens": int(generated.top.size),
        "text_sha256": hashlib.sha256(windows.tobytes()).hexdigest()[:16],
        "perplexity": round(math.exp(-float(exact.logprobs.mean(dtype=np.float64))), 4),
        "perplexity_ratio": round(math.exp(float(surprise.mean())), 5),
        "mean_abs_logprob_difference": round(float(np.abs(surprise).mean()), 5),
        "same_top1": round(float((generated.top == exact.top).mean()), 5),
        "prompt_role_samples": PROMPT_SAMPLES,
        "prompt_role_differs": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
