"""The torch executor: a `ModelSpec` on a CPU, or on a GPU where there is one.

Every step is given to PyTorch at once, in `submit`. On a CPU it is over when `submit` returns; on a GPU it runs on, and `result` waits
for it. Sampled tokens stay on the device, so that the next step can take them without being told.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from sterna.config.cores import usable_cores
from sterna.config.memory import available_memory_bytes
from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError, ModelError
from sterna.executor.base import STATUS_NAN, STATUS_OK, Executor, ExecutorInfo, ForwardBatch, Int32Array, StepHandle, StepOutput
from sterna.executor.kv_memory import choose_group_slots, kv_bytes
from sterna.executor.torch.kv_pool import KVPool
from sterna.executor.torch.model import TorchModel, WeightSource
from sterna.executor.torch.plan import StepPlan, make_plan
from sterna.executor.torch.sampler import Sampled, Sampler
from sterna.models.spec import ModelSpec
from sterna.models.weights import WeightStore
from sterna.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)


def create(args: ServerArgs, folder: Path) -> TorchExecutor:
    """Load the resolved model `folder`. Raises ConfigError, ModelError (`registry.create_executor`)."""
    try:
        spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ModelSpec)
    except (OSError, msgspec.MsgspecError) as fault:
        raise ModelError(f"{folder}: not a resolved model folder: {fault}") from fault
    return make(args, ModelConfig.load(folder), spec, WeightStore.open(folder))


def make(args: ServerArgs, config: ModelConfig, spec: ModelSpec, weights: WeightSource) -> TorchExecutor:
    """As `create`, from a model at hand."""
    if args.executor_options:
        raise ConfigError(f"the torch executor has no options, so --executor-options can't be {args.executor_options!r}")
    if not spec.causal:
        raise ModelError("the torch executor runs decoders only")
    device = _device(args.device)
    dtype = _dtype(args.dtype, device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads or usable_cores())
    with torch.inference_mode():
        model = TorchModel(spec, weights, dtype, device)
        group_slots = choose_group_slots(args, spec, dtype.itemsize, _available_bytes(device))
        pool = KVPool(spec, group_slots, args.page_size, dtype, device)
        sampler = Sampler(spec.vocab_size, config.eos_token_ids, device)
    exact = device.type == "cpu" and dtype == torch.float32
    info = ExecutorInfo(
        name="torch",
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        group_slots=group_slots,
        group_windows=tuple(group.window for group in spec.kv_groups),
        page_size=args.page_size,
        max_batch_rows=args.max_running_requests,
        max_context_len=args.context_length or config.context_len,
        reuse_generated_kv=True,
        exactness="token" if exact else "none",
        kv_bytes_per_token=kv_bytes(spec, (1,) * len(group_slots), dtype.itemsize),
        overlap=device.type != "cpu",
        details={
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "kv_bytes": kv_bytes(spec, group_slots, dtype.itemsize),
        },
    )
    shown = " + ".join(map(str, group_slots))
    log.info("torch executor: %s on %s, %d threads, %s KV slots", info.dtype, info.device, torch.get_num_threads(), shown)
    return TorchExecutor(info, model, pool, sampler)


class TorchExecutor(Executor):
    """See `base.Executor`. Prompt and generated tokens go through the same arithmetic, so all KV is reusable."""

    def __init__(self, info: ExecutorInfo, model: TorchModel, pool: KVPool, sampler: Sampler) -> None:
        self.info = info
        self.pool = pool
        self._model = model
        self._sampler = sampler
        self._last: _Step | None = None

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        with torch.inference_mode():
            self._sampler.bind(req_pool_idx, params, prompt, output)

    def release(self, req_pool_idx: int) -> None:
        self._sampler.release(req_pool_idx)

    def submit(self, batch: ForwardBatch) -> StepHandle:
        try:
            with torch.inference_mode():
                step = self._run(batch)
        except Exception as fault:
            self._last = None
            return _FailedStep(fault)
        self._last = step
        return step

    def shutdown(self) -> None:
        self._last = None
        self.pool.layers.clear()

    def _run(self, batch: ForwardBatch) -> _Step:
        plan = make_plan(batch, self.info.group_windows, self._model.device)
        rows = batch.req_pool_idx[plan.sample_rows]
        self._sampler.state.require_bound(rows)
        self.pool.copy_pages(batch.groups)
        logits = self._model.forward(self._input_ids(batch), plan, self.pool)
        return _Step(batch, plan, self._sampler.sample(logits, rows) if len(rows) else None)

    def _input_ids(self, batch: ForwardBatch) -> torch.Tensor:
        ids = torch.from_numpy(batch.input_ids.astype(np.int64)).to(self._model.device, non_blocking=True)
        rows = np.flatnonzero(batch.input_from >= 0) if batch.input_from is not None else ()
        if batch.input_from is None or not len(rows):
            return ids
        last = self._last
        if last is None or last.batch.step != batch.step - 1 or last.sampled is None:
            raise ValueError(f"step {batch.step} takes tokens of step {batch.step - 1}, which sampled none")
        sources = batch.input_from[rows]
        found = np.searchsorted(last.plan.sample_rows, sources)
        if (found == len(last.plan.sample_rows)).any() or (last.plan.sample_rows[found] != sources).any():
            raise ValueError(f"step {batch.step} takes tokens of rows that sampled none: {sources.tolist()}")
        where = torch.from_numpy(batch.row_splits[rows].astype(np.int64)).to(ids.device)
        return ids.index_copy_(0, where, last.sampled.ids.index_select(0, torch.from_numpy(found).to(ids.device)))


@dataclass(slots=True, frozen=True)
class _Step:
    """A step that has been given to PyTorch."""

    batch: ForwardBatch
    plan: StepPlan
    sampled: Sampled | None
    """Of `plan.sample_rows`; None where there are none."""

    def result(self) -> StepOutput:
        status = np.full(self.batch.num_rows, STATUS_OK, dtype=np.uint8)
        counts = np.zeros(self.batch.num_rows, dtype=np.int32)
        ids = np.zeros(0, dtype=np.int32)
        logprobs = None
        if self.sampled is not None:
            ok = self.sampled.ok.cpu().numpy()
            rows = self.plan.sample_rows
            status[rows[~ok]] = STATUS_NAN
            counts[rows[ok]] = 1
            ids = self.sampled.ids.cpu().numpy()[ok].astype(np.int32)
            if self.sampled.logprobs is not None:
                told = self.sampled.logprobs.by_place()
                logprobs = [told.get(place) for place in np.flatnonzero(ok).tolist()]
        splits = np.zeros(self.batch.num_rows + 1, dtype=np.int32)
        np.cumsum(counts, out=splits[1:])
        return StepOutput(self.batch.step, ids, splits, status, logprobs)


@dataclass(slots=True, frozen=True)
class _FailedStep:
    fault: Exception

    def result(self) -> StepOutput:
        raise self.fault


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no GPU")
    return device


def _available_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory_bytes()


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _has_bfloat16(device: torch.device) -> bool:
    """Whether there are instructions for it: emulated, it is slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
