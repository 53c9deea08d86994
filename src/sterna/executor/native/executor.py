"""The native executor: a `ModelSpec` on a CPU, by the C++ engine, without PyTorch.

A step runs on the engine's own threads and holds no Python lock; `submit` returns at once.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np

import sterna.executor.native._native as _native
from sterna.config.cores import usable_cores
from sterna.config.memory import available_memory_bytes, show_bytes
from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError, ModelError
from sterna.executor.base import STATUS_NAN, STATUS_OK, Executor, ExecutorInfo, ForwardBatch, Int32Array, StepHandle, StepOutput
from sterna.executor.kv_memory import choose_group_slots, kv_bytes
from sterna.executor.native.isa import choose_isa
from sterna.executor.native.pack import load_spec, open_packed
from sterna.executor.native.plan import Weights, engine_config
from sterna.executor.native.sampling import to_logprobs, to_options
from sterna.files.cache import cache_root
from sterna.models.spec import KVGroup, ModelSpec, kv_groups
from sterna.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

KV_BYTES_PER_ELEMENT = 2
"""Keys and values are bfloat16."""
PAGE = 16
"""Slots that the engine reads together (csrc/kernels/kernels.h: kPage)."""
DIM_STEP = 16
"""Numbers of a key or value head come in whole such steps (`padded_dim` there)."""


def create(args: ServerArgs, folder: Path) -> NativeExecutor:
    """Load the resolved model `folder`, packing its weights if no start has yet.

    Raises ConfigError, ModelError (`registry.create_executor`).
    """
    spec = load_spec(folder)
    weights = open_packed(folder, cache_root(args.cache_dir), args.quantization)
    return make(args, ModelConfig.load(folder), spec, weights)


def make(args: ServerArgs, config: ModelConfig, spec: ModelSpec, weights: Weights) -> NativeExecutor:
    """As `create`, from a model at hand."""
    if args.executor_options:
        raise ConfigError(f"the native executor has no options, so --executor-options can't be {args.executor_options!r}")
    if args.page_size % PAGE:
        raise ConfigError(f"--page-size must be a multiple of {PAGE} for the native executor, not {args.page_size}")
    if not spec.causal:
        raise ModelError("the native executor runs decoders only")
    isa, cores = choose_isa(args), usable_cores()
    threads = args.threads or cores
    if threads > cores:
        log.warning("--threads %d: %s may be used here; threads that share a core wait for one another", threads, _count(cores, "core"))
    stored = msgspec.structs.replace(spec, kv_groups=stored_kv_groups(spec))
    slots = choose_group_slots(args, stored, KV_BYTES_PER_ELEMENT, available_memory_bytes())
    try:
        engine = _native.Engine(engine_config(spec, weights), list(slots), threads, isa)
    except ValueError as fault:
        raise ModelError(f"the native executor can't run this model: {fault}") from fault
    except MemoryError:
        raise ConfigError(
            f"no memory for a KV pool of {show_bytes(kv_bytes(stored, slots, KV_BYTES_PER_ELEMENT))}: see --kv-memory"
        ) from None
    except RuntimeError as fault:  # std::system_error
        raise ConfigError(f"the system gives no {_count(threads, 'compute thread')}: {fault}; see --threads") from fault
    info = ExecutorInfo(
        name="native",
        dtype=config.weights_dtype,
        device="cpu",
        group_slots=slots,
        group_windows=tuple(group.window for group in spec.kv_groups),
        page_size=args.page_size,
        max_batch_rows=args.max_running_requests,
        max_context_len=args.context_length or config.context_len,
        reuse_generated_kv=True,
        exactness="bitwise",
        kv_bytes_per_token=KV_BYTES_PER_ELEMENT * sum(group.elements_per_token for group in stored.kv_groups),
        details={
            "isa": isa,
            "isas_available": ", ".join(_native.available_isas()),
            "arithmetic": args.arithmetic,
            "threads": threads,
            "quantization": weights.header.quantization,
            "weights_bytes": weights.header.data_bytes,
            "kv_dtype": args.kv_dtype,
            "kv_bytes": engine.kv_bytes,
            "kv_lead_bytes": engine.kv_lead_bytes,
        },
    )
    _say(info, spec)
    return NativeExecutor(info, engine, spec.vocab_size, config.eos_token_ids)


def stored_kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """`spec.kv_groups`, every head as wide as the engine stores it."""

    def padded(head_dim: int) -> int:
        return -(-head_dim // DIM_STEP) * DIM_STEP

    replace = msgspec.structs.replace
    layers = [replace(layer, mixer=replace(layer.mixer, head_dim=padded(layer.mixer.head_dim))) for layer in spec.layers]
    return kv_groups(tuple(layers))


def _say(info: ExecutorInfo, spec: ModelSpec) -> None:
    """All that was chosen, for whoever reads the log."""
    said = info.details
    log.info(
        "native executor: %s (here: %s), %s, %s arithmetic",
        said["isa"],
        said["isas_available"],
        _count(said["threads"], "thread"),
        said["arithmetic"],
    )
    quantization = "" if said["quantization"] == "none" else f" quantized to {said['quantization']}"
    log.info("weights: %s%s, %s packed", info.dtype, quantization, show_bytes(int(said["weights_bytes"])))
    for group, slots in zip(spec.kv_groups, info.group_slots, strict=True):
        seen = f"a window of {group.window} tokens" if group.window else "all tokens"
        log.info(
            "KV of %s that see %s: room for %d tokens, in pages of %d", _count(len(group.layers), "layer"), seen, slots, info.page_size
        )
    size, lead = show_bytes(int(said["kv_bytes"])), show_bytes(int(said["kv_lead_bytes"]))
    log.info(
        "KV pool: %s of %s reserved, touched as used and, when there is nothing to compute, up to %s ahead", size, said["kv_dtype"], lead
    )


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


class NativeExecutor(Executor):
    """See `base.Executor`. Prompt and generated tokens go through the same arithmetic, so all KV is reusable."""

    def __init__(self, info: ExecutorInfo, engine: _native.Engine, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.info = info
        self.engine = engine
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        options = to_options(params, self._vocab_size, self._eos_token_ids)
        self.engine.bind(req_pool_idx, options, np.ascontiguousarray(prompt), np.ascontiguousarray(output))

    def release(self, req_pool_idx: int) -> None:
        self.engine.release(req_pool_idx)

    def submit(self, batch: ForwardBatch) -> StepHandle:
        # The engine copies what it needs of these before it returns.
        self.engine.submit(
            batch.step,
            batch.input_ids,
            batch.input_from,
            batch.row_splits,
            batch.prefix_lens,
            batch.seq_lens,
            batch.req_pool_idx,
            batch.wants,
            [(group.req_to_token, group.out_cache_loc, group.copied_from, group.copied_to) for group in batch.groups],
        )
        return _Step(self.engine, batch)

    def shutdown(self) -> None:
        """Steps in flight are given up: waiting for their results raises RuntimeError."""
        self.engine.stop()


class _Step:
    def __init__(self, engine: _native.Engine, batch: ForwardBatch) -> None:
        self._engine = engine
        self._step = batch.step

    def result(self) -> StepOutput:
        tokens, is_nan, found = self._engine.wait(self._step)
        status = np.where(is_nan, STATUS_NAN, STATUS_OK).astype(np.uint8)
        made = tokens >= 0
        splits = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum(made, out=splits[1:])
        logprobs = None if found is None else to_logprobs([found[row] for row in np.flatnonzero(made).tolist()])
        return StepOutput(step=self._step, token_ids=tokens[made], row_splits=splits, status=status, logprobs=logprobs)
