"""The torch executor against plain eager PyTorch, in one process and one run: only the ratios mean anything.

    python bench/executor_torch.py [--dtype bfloat16] [--threads N] [--rounds 5]

Both run the same random weights in SmolLM2-135M's shape. The plain one is what a reader would write first: `functional.linear`, one
contiguous KV tensor per layer with room for the whole text, `scaled_dot_product_attention`, argmax; it pays for no slots, pages, sampler
or NumPy seam.
Rounds alternate, and medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from sterna.config.cores import usable_cores
from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, WANT_SAMPLE, ForwardBatch, GroupSlots
from sterna.executor.torch.executor import TorchExecutor, make
from sterna.models.spec import AttentionSpec, GatedMLPSpec, KVGroup, LayerSpec, ModelSpec, RopeSpec, weight_shapes
from sterna.protocol.sampling import SamplingParams

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
CONTEXT = 2048
EPS = 1e-5
ATTENTION = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, scale=WIDTH**-0.5, rope=RopeSpec(theta=1e5, dim=WIDTH))
SPEC = ModelSpec(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    layers=(LayerSpec(ATTENTION, GatedMLPSpec(INNER), EPS),) * LAYERS,
    kv_groups=(KVGroup("full", tuple(range(LAYERS)), LAYERS * 2 * KV_HEADS * WIDTH),),
    final_norm_eps=EPS,
    tied_head=True,
)
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
}


class RandomWeights:
    """Every weight of `SPEC`, from a fixed seed."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._made: dict[str, NDArray[np.float32]] = {}

    def float32(self, name: str) -> NDArray[np.float32]:
        if name not in self._made:
            shape = weight_shapes(SPEC)[name]
            scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            self._made[name] = self._rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return self._made[name]


class PlainModel:
    """The yardstick."""

    def __init__(self, weights: RandomWeights, dtype: torch.dtype) -> None:
        self.weights = {name: torch.from_numpy(weights.float32(name)).to(dtype) for name in weight_shapes(SPEC)}
        angles = torch.outer(torch.arange(CONTEXT), 1e5 ** (-torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.dtype = dtype
        self.length = 0
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start(self, rows: int, context: int) -> None:
        """Rows whose first `context` tokens lie in the cache (as zeros: only the time matters)."""
        shape = (rows, KV_HEADS, CONTEXT, WIDTH)
        self.length, self.cache = (
            context,
            [(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)) for _ in range(LAYERS)],
        )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, n) ids -> (B, 1): the likeliest next ones."""
        weights, end = self.weights, self.length + ids.shape[1]
        cos, sin = self.cos[self.length : end], self.sin[self.length : end]
        x = weights["embed"][ids]
        for i, (keys, values) in enumerate(self.cache):
            at = f"layers.{i}"
            normed = functional.rms_norm(x, (HIDDEN,), weights[f"{at}.attn_norm"], EPS)
            q, k, v = (_heads(functional.linear(normed, weights[f"{at}.attn.{part}"])) for part in ("q", "k", "v"))
            keys[:, :, self.length : end], values[:, :, self.length : end] = _rotated(k, cos, sin), v
            mixed = functional.scaled_dot_product_attention(
                _rotated(q, cos, sin), keys[:, :, :end], values[:, :, :end], is_causal=ids.shape[1] > 1, enable_gqa=True
            )
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), weights[f"{at}.attn.o"])
            normed = functional.rms_norm(x, (HIDDEN,), weights[f"{at}.mlp_norm"], EPS)
            gate, up = (functional.linear(normed, weights[f"{at}.mlp.{part}"]) for part in ("gate", "up"))
            x = x + functional.linear(functional.silu(gate) * up, weights[f"{at}.mlp.down"])
        self.length = end
        last = functional.rms_norm(x[:, -1:], (HIDDEN,), weights["final_norm"], EPS)
        return functional.linear(last, weights["embed"]).argmax(-1)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Engine:
    """The executor, driven as a scheduler drives it: the text so far lies in pages in no particular order."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.step = 0
        with torch.inference_mode():
            for layer in executor.pool.layers:
                layer.zero_()

    def start(self, rows: int, context: int, params: SamplingParams) -> None:
        pages = np.random.default_rng(0).permutation(self.executor.info.num_slots // 16)[: rows * CONTEXT // 16]
        self.table = (pages[:, None] * 16 + np.arange(16)).reshape(rows, CONTEXT).astype(np.int32)
        self.length, self.rows = context, rows
        for row in range(rows):
            self.executor.release(row)
            self.executor.bind(row, params, np.arange(8, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def __call__(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """(B * n,) ids -> (B,)."""
        count, rows = len(ids) // self.rows, self.rows
        start, self.length, self.step = self.length, self.length + count, self.step + 1
        batch = ForwardBatch(
            step=self.step,
            input_ids=ids,
            input_from=None,
            row_splits=np.arange(0, len(ids) + 1, count, dtype=np.int32),
            prefix_lens=np.full(rows, start, dtype=np.int32),
            seq_lens=np.full(rows, self.length, dtype=np.int32),
            req_pool_idx=np.arange(rows, dtype=np.int32),
            roles=np.full(rows, ROLE_GENERATED if count == 1 else ROLE_PROMPT, dtype=np.uint8),
            wants=np.full(rows, WANT_SAMPLE, dtype=np.uint8),
            groups=(GroupSlots(self.table[:, start : self.length].ravel(), self.table),),
        )
        return self.executor.submit(batch).result().token_ids


def _seconds(step: Callable[[], object], steps: int) -> float:
    """Of one step, over `steps` of them."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _decode_plain(model: PlainModel, rows: int, context: int, steps: int) -> float:
    model.start(rows, context)
    ids = [torch.ones(rows, 1, dtype=torch.int64)]

    def step() -> None:
        ids[0] = model(ids[0])

    step()
    return _seconds(step, steps)


def _decode_engine(engine: Engine, rows: int, context: int, steps: int, params: SamplingParams) -> float:
    engine.start(rows, context, params)
    ids = [np.ones(rows, dtype=np.int32)]

    def step() -> None:
        ids[0] = engine(ids[0])

    step()
    return _seconds(step, steps)


def _prefill(start: Callable[[], None], run: Callable[[], object]) -> float:
    start()
    return _seconds(run, 1)


def _report(name: str, tokens: int, plain: list[float], engine: list[float]) -> None:
    ours, theirs = tokens / statistics.median(engine), tokens / statistics.median(plain)
    print(f"{name:32} plain {theirs:8.1f} tok/s   executor {ours:8.1f} tok/s   ratio {ours / theirs:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()

    weights = RandomWeights()
    args = ServerArgs(dtype=options.dtype, device="cpu", threads=options.threads, max_total_tokens=17 * CONTEXT, context_length=CONTEXT)
    facts = ModelConfig(
        name="random",
        source="",
        family="llama",
        weights_dtype="F32",
        num_parameters=0,
        vocab_size=VOCAB,
        context_len=CONTEXT,
        bos_token_id=None,
        eos_token_ids=(2,),
    )
    engine = Engine(make(args, facts, SPEC, weights))
    with torch.inference_mode():
        plain = PlainModel(weights, getattr(torch, options.dtype))
        print(f"{options.dtype}, {options.threads} threads, medians of {options.rounds} rounds of {options.steps} steps")
        for rows, context in ((1, 64), (16, 64), (16, 768)):
            pairs = [
                (
                    _decode_plain(plain, rows, context, options.steps),
                    _decode_engine(engine, rows, context, options.steps, SAMPLERS["greedy"]),
                )
                for _ in range(options.rounds)
            ]
            _report(f"decode, {rows} rows, context {context}", rows, *map(list, zip(*pairs, strict=True)))
        prompt = np.ones(512, dtype=np.int32)
        pairs = [
            (
                _prefill(lambda: plain.start(1, 0), lambda: plain(torch.ones(1, 512, dtype=torch.int64))),
                _prefill(lambda: engine.start(1, 0, SAMPLERS["greedy"]), lambda: engine(prompt)),
            )
            for _ in range(options.rounds)
        ]
        _report("prefill, 512 tokens", 512, *map(list, zip(*pairs, strict=True)))
        for name, params in SAMPLERS.items():
            seconds = statistics.median(_decode_engine(engine, 16, 64, options.steps, params) for _ in range(options.rounds))
            print(f"16 rows, {name:12} {16 / seconds:8.1f} tok/s", flush=True)


if __name__ == "__main__":
    main()
