"""The real scheduler over a real executor in this process: no sockets.

After every step each slot's owner is checked, and the KV of slots that nobody owns is overwritten with NaN: whoever reads a slot that is
not its own gets no valid token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.executor.base import ROLE_GENERATED, ROLE_PROMPT, Executor, ForwardBatch, Int32Array, StepHandle, StepOutput
from sterna.executor.native.executor import PAGE, NativeExecutor
from sterna.executor.registry import create_executor
from sterna.executor.torch.executor import TorchExecutor
from sterna.models.spec import ModelSpec
from sterna.protocol.control import OutputCredit
from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import AbortReq, TokenizedGenerateReqInput
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.process import LazyTokenizer, create_scheduler
from unit.scheduler.harness import Inbox, Outbox

EPOCH = 3
THREADS = 1
"""Compute threads of everything under test: two that wait for each other on a busy machine take far longer than one."""

GREEDY = SamplingParams(temperature=0.0)
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": (3, 40)}
EXACT: dict[str, dict[str, Any]] = {"torch": {"dtype": "float32", "device": "cpu"}, "native": {}}
"""Settings with which an executor's tokens depend on the request only."""


@dataclass(frozen=True)
class Ask:
    """One request. Greedy unless `params` say otherwise."""

    prompt: list[int]
    tokens: int
    turn: int = 0
    """Of the run, at which it arrives."""
    params: SamplingParams = GREEDY
    resume: tuple[int, ...] = ()
    ignore_eos: bool = True


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    logprobs: list[TokenLogprobs]
    """One per token, where the engine asks."""
    reason: FinishReason
    cached_tokens: int
    chunks: int
    """Prefill chunks that it took."""
    retractions: int
    batch_size: int
    """Rows of the largest step that it was in."""


class Watched(Executor):
    """Passes everything on, and tells what each step is made of."""

    def __init__(self, inner: Executor, on_step: Callable[[ForwardBatch], None], *, overlap: bool) -> None:
        self.info = replace(inner.info, overlap=overlap)
        self.inner = inner
        self.steps_on_top = 0
        """Submitted before the one before it was read."""
        self._unread = 0
        self._on_step = on_step

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        self.inner.bind(req_pool_idx, params, prompt, output)

    def release(self, req_pool_idx: int) -> None:
        self.inner.release(req_pool_idx)

    def submit(self, batch: ForwardBatch) -> StepHandle:
        self._on_step(batch)
        self.steps_on_top += self._unread > 0
        self._unread += 1
        return WatchedStep(self, self.inner.submit(batch))

    def read(self, handle: StepHandle) -> StepOutput:
        self._unread -= 1
        return handle.result()

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass(frozen=True)
class WatchedStep:
    executor: Watched
    handle: StepHandle

    def result(self) -> StepOutput:
        return self.executor.read(self.handle)


class Engine:
    """One model, loaded. Its prefix cache lives from one `run` to the next."""

    def __init__(self, folder: Path, *, executor: str = "torch", overlap: bool = False, logprobs: bool = False, **settings: Any) -> None:
        """`overlap`: each step is submitted before the one before it is read, as on a device that runs beside the host. `logprobs`: every
        request asks for them. `settings` are of `ServerArgs`."""
        model = ModelConfig.load(folder)
        defaults: dict[str, Any] = {"max_total_tokens": 4096, "context_length": model.context_len, "threads": THREADS}
        args = ServerArgs(executor=executor, **EXACT[executor], **{**defaults, **settings})
        self.executor = Watched(create_executor(args, folder), self._on_step, overlap=overlap)
        self.batches: list[ForwardBatch] = []
        """Of the last run."""
        self.inbox, self.outbox = Inbox(), Outbox()
        self.scheduler = create_scheduler(
            args, model, self.executor, self.inbox, self.outbox, epoch=EPOCH, tokenizer=LazyTokenizer(folder), check_every_slot=True
        )
        self._asked = 0
        self._wish = LOGPROBS if logprobs else {}
        self._batch_sizes: dict[str, int] = {}
        self._group_layers = [group.layers for group in msgspec.json.decode((folder / "spec.json").read_bytes(), type=ModelSpec).kv_groups]
        self._spoilt = [np.zeros(slots, dtype=np.bool_) for slots in self.executor.info.group_slots]
        self.most_held = [0] * len(self._group_layers)
        """Per KV group, the most slots that one request has held, or locked, in a step."""
        self.spoil()

    @property
    def saw_a_mixed_step(self) -> bool:
        """Whether a step of the last run had prompts beside generated tokens."""
        return any({ROLE_PROMPT, ROLE_GENERATED} <= set(batch.roles.tolist()) for batch in self.batches)

    def run(self, *asks: Ask, aborts: dict[int, int] | None = None) -> list[Answer]:
        """Serve `asks` until all have ended. `aborts`: the index of an ask to the turn at which its client goes.

        Fails where memory isn't at its baseline afterwards, or where a request ends otherwise than by itself or by its abort.
        """
        self.batches.clear()
        rids = [f"r{self._asked + index}" for index in range(len(asks))]
        self._asked += len(asks)
        last = max([ask.turn for ask in asks] + list((aborts or {}).values()))
        turn = 0
        while turn <= last or not self.scheduler.is_idle:
            for rid, ask in zip(rids, asks, strict=True):
                if ask.turn == turn:
                    self._send(rid, ask)
            self.inbox.messages += [AbortReq(rid=rids[index]) for index, at in (aborts or {}).items() if at == turn]
            self._turn()
            turn += 1
        assert self.scheduler.ledger.used == 0
        answers = [self._answer(rid) for rid in rids]
        for index, answer in enumerate(answers):
            assert not isinstance(answer.reason, FinishAbort) or (aborts and index in aborts), answer.reason
        return answers

    def ids(self, *prompts: list[int], tokens: int) -> list[list[int]]:
        """What the model says to each of `prompts`, asked together."""
        return [answer.ids for answer in self.run(*(Ask(prompt, tokens) for prompt in prompts))]

    def flush(self) -> None:
        self.scheduler.ledger.cache.flush()
        self.spoil()

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    def _send(self, rid: str, ask: Ask) -> None:
        self.inbox.messages.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=ask.prompt,
                sampling_params=_replace(ask.params, max_new_tokens=ask.tokens, ignore_eos=ask.ignore_eos, **self._wish),
                stream=True,
                reply_to="",
                resume_output_ids=list(ask.resume),
            )
        )

    def _turn(self) -> None:
        published = self.outbox.batches
        self.scheduler.receive()
        self.scheduler.step()
        if self.outbox.batches > published:
            self.inbox.messages.append(OutputCredit(batches=self.outbox.batches - published))
        self.spoil()

    def _on_step(self, batch: ForwardBatch) -> None:
        self.batches.append(batch)
        self._measure()
        rows = set(batch.req_pool_idx.tolist())
        for req in self.scheduler.reqs.values():
            if req.req_pool_idx in rows:
                self._batch_sizes[req.rid] = max(self._batch_sizes.get(req.rid, 0), batch.num_rows)

    def spoil(self) -> None:
        """Slots that have just become nobody's."""
        for group in range(len(self._group_layers)):
            free = np.zeros_like(self._spoilt[group])
            free[self.scheduler.ledger.pools.groups[group].free_slots()] = True
            freed = np.flatnonzero(free & ~self._spoilt[group])
            self._spoilt[group] = free
            if len(freed):
                self._fill_with_nan(group, freed)

    def _fill_with_nan(self, group: int, slots: NDArray[np.intp]) -> None:
        match self.executor.inner:
            case NativeExecutor(engine=engine):
                for page in np.unique(slots // PAGE).tolist():  # whole pages: the scheduler's are multiples of these
                    engine.fill_page(group, page, 0xFF)
            case TorchExecutor(pool=pool):
                with torch.inference_mode():
                    for layer in self._group_layers[group]:
                        pool.layers[layer].index_fill_(0, torch.from_numpy(slots), torch.nan)
            case other:
                raise NotImplementedError(type(other))

    def _measure(self) -> None:
        windows = {group: index for index, (group, _) in enumerate(self.scheduler.ledger.pools.windows)}
        for req in self.scheduler.reqs.values():
            for group in range(len(self.most_held)):
                start = req.window_starts[windows[group]] if group in windows and req.window_starts else 0
                self.most_held[group] = max(self.most_held[group], req.allocated_len - start)

    def _answer(self, rid: str) -> Answer:
        rows = self.outbox.rows[rid]
        reason, times, opening = rows[-1].finished_reason, rows[-1].times, rows[0].opening
        assert reason is not None
        assert times is not None
        assert opening is not None
        return Answer(
            ids=[token for row in rows for token in row.output_ids],
            logprobs=[each for row in rows for each in row.logprobs or []],
            reason=reason,
            cached_tokens=opening.cached_tokens,
            chunks=times.chunks,
            retractions=times.retractions,
            batch_size=self._batch_sizes.get(rid, 0),
        )


def _replace(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def cached_again(engine: Engine, length: int, tokens: int) -> int:
    """What is cached of a prompt of so many tokens that was answered with `tokens`: all but the last, whose logits are needed.

    Unless the answer has filled the page that the prompt ends in and gone a window beyond it before that page went to the cache.
    """
    pools = engine.scheduler.ledger.pools
    page = (length - 1) // pools.page_size * pools.page_size
    starts = pools.window_starts(length + tokens - 1)
    lost = length % pools.page_size and any(start >= page + pools.page_size for start in starts)
    return page if lost else length - 1


def random_ids(draw: np.random.RandomState, length: int, vocab_size: int) -> list[int]:
    """Any tokens but the first few, which are special ones in the models here."""
    ids: list[int] = draw.randint(3, vocab_size, length).tolist()
    return ids
