"""An executor that runs no model: for tests, and for measuring the host. Output token k of a request is `prompt[k % len(prompt)]`; its
logprobs, where it asks for them, are `scripted_logprobs`.

Its "KV" is what a model's would have to be: in each group each slot remembers the token, the position and the role that were written to
it, and each step verifies that what every row sees is exactly its tokens, in order, in the right roles. A slot that was shared, freed or
evicted wrongly raises `ScriptViolation` at the first step that would have read it. So does whatever happens to a row, or to the slots of
what it sees, between the step's `submit` and its `result`.

`--executor-options key=value,…`:

    verify=1                 0 leaves the checks out, for benchmarks
    reuse_generated_kv=1     what `ExecutorInfo.reuse_generated_kv` says; 0 also verifies that no generated KV serves a prompt
    threaded=0               1: `submit` returns at once, and steps run in a thread
    overlap=0                what `ExecutorInfo.overlap` says
    step_ms=0                a step takes this long, …
    prefill_us_per_token=0   … and this much longer per prompt token
    nan_token=ID             a row that would sample ID gets STATUS_NAN
    raise_token=ID           a step in which a row would sample ID raises
    crash_token=ID           a step in which a row would sample ID kills the process, as kill -9 does
    fail_bind_token=ID       `bind` raises for a prompt that begins with ID
    max_batch_rows=65536
    windows=0                the KV groups' windows, as 0:16:64; 0 is a group without one
    window_slots=0           slots of each group with a window; 0: as many as the others have
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.errors import ConfigError
from sterna.executor.base import (
    ROLE_GENERATED,
    ROLE_PROMPT,
    STATUS_NAN,
    STATUS_OK,
    WANT_SAMPLE,
    Executor,
    ExecutorInfo,
    ForwardBatch,
    Int32Array,
    StepHandle,
    StepOutput,
    UInt8Array,
)
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams

DEFAULT_NUM_SLOTS = 65536

T = TypeVar("T")
U = TypeVar("U")


class ScriptViolation(Exception):
    """The scheduler broke the seam's contract."""


def _read_windows(text: str) -> tuple[int, ...]:
    return tuple(int(window) for window in text.split(":"))


_READERS: dict[str, Callable[[str], float | tuple[int, ...]]] = {
    "step_ms": float,
    "prefill_us_per_token": float,
    "windows": _read_windows,
}


@dataclass(slots=True, frozen=True)
class ScriptOptions:
    verify: int = 1
    reuse_generated_kv: int = 1
    threaded: int = 0
    overlap: int = 0
    step_ms: float = 0.0
    prefill_us_per_token: float = 0.0
    nan_token: int = -1
    raise_token: int = -1
    crash_token: int = -1
    fail_bind_token: int = -1
    max_batch_rows: int = 65536
    windows: tuple[int, ...] = (0,)
    window_slots: int = 0

    @staticmethod
    def parse(text: str) -> ScriptOptions:
        """Raises ConfigError for a key that doesn't exist or a value that isn't a number."""
        values: dict[str, float | tuple[int, ...]] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in ScriptOptions.__slots__:
                raise ConfigError(f"--executor-options: the scripted executor has no {key!r}; it has {', '.join(ScriptOptions.__slots__)}")
            try:
                values[key] = _READERS.get(key, int)(value)
            except ValueError:
                raise ConfigError(f"--executor-options: {key} must be a number, not {value!r}") from None
        return ScriptOptions(**values)  # type: ignore[arg-type]


def scripted_logprobs(params: SamplingParams, position: int, token: int) -> TokenLogprobs:
    """Of output token `token` at `position` of its request, the prompt's tokens counted too.

    Each number tells of one token at one place: another place, or token, has another (of millions, now and then the same). All are float32
    and lie in (-32, 0]. The top list has the likeliest of the token itself and of as many of the lowest ids as are asked for, so that the
    token may stand anywhere in it, or not at all. No vocabulary is known here: it must be as large as the list is long.
    """

    def order(candidate: int) -> tuple[float, int]:
        return -_scripted_logprob(position, candidate), candidate

    top = sorted({token, *range(params.top_logprobs_num)}, key=order)[: params.top_logprobs_num]
    return TokenLogprobs.pack(
        _scripted_logprob(position, token),
        top,
        [_scripted_logprob(position, candidate) for candidate in top],
        [_scripted_logprob(position, candidate) for candidate in params.token_ids_logprob],
    )


def _scripted_logprob(position: int, token: int) -> float:
    """23 bits of a hash: two odd multipliers from the golden ratio and the square root of two, so that no small step in one is a small
    step in the other."""
    return -((0x9E3779B1 * position + 0x6A09E667 * token & 0xFFFFFFFF) >> 9) / 2**18


@dataclass(slots=True, eq=False)
class Script:
    """A bound row: what it was given and what it has sampled."""

    params: SamplingParams
    prompt: Int32Array
    tokens: Int32Array
    """(capacity,): prompt, then output; only `tokens[:length]` are there."""
    length: int

    def next_token(self) -> int:
        return int(self.prompt[(self.length - len(self.prompt)) % len(self.prompt)])

    def append(self, token: int) -> None:
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.length), dtype=np.int32)])
        self.tokens[self.length] = token
        self.length += 1


def slots_of_pages(first_slots: Int32Array, page_size: int) -> Int32Array:
    return (first_slots[:, None] + np.arange(page_size, dtype=np.int32)).ravel().astype(np.int32)


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


class ScriptedStep:
    """A step that is over when it is made, or runs in a thread."""

    def __init__(self, wait: Callable[[], StepOutput], read: Callable[[], None]) -> None:
        self._wait = wait
        self._read = read

    def result(self) -> StepOutput:
        """Raises ScriptViolation where it is asked twice, or where what the step reads isn't as it was."""
        try:
            return self._wait()
        finally:
            self._read()


class UnreadSteps:
    """What must stay as it is: the contexts of rows whose step was submitted and hasn't been read, and the pages that it copies."""

    def __init__(self, windows: tuple[int | None, ...], page_size: int) -> None:
        """`windows`: of the KV groups."""
        self._windows = windows
        self._page_size = page_size
        self.num_on_top = 0
        """Steps that were submitted before the one before them was read."""
        self._steps: dict[int, tuple[ForwardBatch, list[list[Int32Array]]]] = {}

    def begin(self, batch: ForwardBatch) -> None:
        if len(self._steps) > 1:
            raise ScriptViolation(f"step {batch.step} is submitted and neither of {list(self._steps)} has been read")
        for step, (_, contexts) in self._steps.items():
            for group, rows in zip(batch.groups, contexts, strict=True):
                written = np.concatenate([group.out_cache_loc, self._pages(group.copied_to)])
                if np.isin(written, np.concatenate(rows)).any():
                    raise ScriptViolation(f"step {batch.step} writes to slots that step {step}, which hasn't been read, reads")
        self.num_on_top += bool(self._steps)
        self._steps[batch.step] = batch, self._contexts(batch)

    def end(self, step: int) -> None:
        """Its result is read, or its submission failed."""
        if step not in self._steps:
            raise ScriptViolation(f"step {step} is read twice")
        batch, contexts = self._steps.pop(step)
        if any((a != b).any() for then, now in zip(contexts, self._contexts(batch), strict=True) for a, b in zip(then, now, strict=True)):
            raise ScriptViolation(f"the slots of step {step} changed before it was read")

    def check_row(self, row: int) -> None:
        for step, (batch, _) in self._steps.items():
            if (batch.req_pool_idx == row).any():
                raise ScriptViolation(f"row {row} is bound or released before step {step} has been read")

    def _contexts(self, batch: ForwardBatch) -> list[list[Int32Array]]:
        """Of each group, of each row: the slots of what it sees."""
        rows = list(zip(batch.req_pool_idx.tolist(), batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True))
        return [
            [
                *(group.req_to_token[row, first_seen(prefix, window) : end].copy() for row, prefix, end in rows),
                self._pages(group.copied_from),
            ]
            for group, window in zip(batch.groups, self._windows, strict=True)
        ]

    def _pages(self, first_slots: Int32Array) -> Int32Array:
        return slots_of_pages(first_slots, self._page_size)


class ScriptedExecutor(Executor):
    def __init__(self, info: ExecutorInfo, options: ScriptOptions) -> None:
        self.info = info
        self._options = options
        self._rows: dict[int, Script] = {}
        # Per group (3, slots): token, position, role of what was written last; -1 where nothing was.
        self._kv: list[NDArray[np.int64]] = [np.full((3, slots), -1, dtype=np.int64) for slots in info.group_slots]
        self._last: StepOutput | None = None
        """Of the step before, for `input_from`; None where it failed."""
        self.unread = UnreadSteps(info.group_windows, info.page_size)
        self.violations: list[str] = []
        """Everything that a `ScriptViolation` was raised for: whoever runs failed steps again may have recovered from it."""
        self._thread = ThreadPoolExecutor(1, "scripted executor") if options.threaded else None

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        self._noting(self.unread.check_row, req_pool_idx)
        if req_pool_idx in self._rows:
            raise ValueError(f"row {req_pool_idx} is bound")
        if prompt[0] == self._options.fail_bind_token:
            raise RuntimeError("scripted failure of bind")
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        self._rows[req_pool_idx] = Script(params, prompt.astype(np.int32), tokens, len(tokens))

    def release(self, req_pool_idx: int) -> None:
        self._noting(self.unread.check_row, req_pool_idx)
        self._rows.pop(req_pool_idx, None)

    @property
    def num_bound(self) -> int:
        return len(self._rows)

    def submit(self, batch: ForwardBatch) -> StepHandle:
        if self._options.verify:
            self._noting(self.unread.begin, batch)
        if self._thread is not None:
            return ScriptedStep(self._thread.submit(self._run, batch).result, lambda: self._end(batch))
        try:
            output = self._run(batch)
        except Exception:
            self._end(batch)
            raise
        return ScriptedStep(lambda: output, lambda: self._end(batch))

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._rows.clear()

    def _noting(self, check: Callable[[T], U], of: T) -> U:
        try:
            return check(of)
        except ScriptViolation as violation:
            self.violations.append(str(violation))
            raise

    def _end(self, batch: ForwardBatch) -> None:
        if self._options.verify:
            self._noting(self.unread.end, batch.step)

    def _run(self, batch: ForwardBatch) -> StepOutput:
        last, self._last = self._last, None
        self._last = self._noting(lambda batch: self._step(batch, last), batch)
        return self._last

    def _step(self, batch: ForwardBatch, last: StepOutput | None) -> StepOutput:
        input_ids, surplus = self._inputs(batch, last)
        if self._options.verify:
            self._verify(batch, input_ids, surplus)
        self._wait(batch)
        sampled, status, logprobs = self._sample(batch, surplus)
        made = sampled >= 0
        splits = np.zeros(batch.num_rows + 1, dtype=np.int32)
        np.cumsum(made, out=splits[1:])
        return StepOutput(batch.step, sampled[made], splits, status, logprobs if any(logprobs) else None)

    def _inputs(self, batch: ForwardBatch, last: StepOutput | None) -> tuple[Int32Array, NDArray[np.bool_]]:
        """Input ids, and (rows,) whose are surplus: those that take a token which there isn't, because it was NaN."""
        surplus = np.zeros(batch.num_rows, dtype=np.bool_)
        taken = np.flatnonzero(batch.input_from >= 0) if batch.input_from is not None else ()
        if batch.input_from is None or len(taken) == 0:
            return batch.input_ids, surplus
        if last is None:
            raise RuntimeError("the step that this one takes tokens from has failed")
        if last.step != batch.step - 1:
            raise ScriptViolation(f"step {batch.step} takes tokens of step {batch.step - 1}, but the last one was {last.step}")
        sources = batch.input_from[taken]
        surplus[taken] = last.status[sources] == STATUS_NAN
        starts = last.row_splits[sources]
        if ((last.row_splits[sources + 1] == starts) & ~surplus[taken]).any():
            raise ScriptViolation(f"step {batch.step} takes tokens of rows that sampled none: {sources.tolist()}")
        ids = batch.input_ids.copy()
        ids[batch.row_splits[taken]] = np.where(surplus[taken], -1, np.append(last.token_ids, np.int32(-1))[starts])
        return ids, surplus

    def _wait(self, batch: ForwardBatch) -> None:
        seconds = self._options.step_ms / 1e3
        if self._options.prefill_us_per_token:
            lengths = np.diff(batch.row_splits)
            seconds += int(lengths[batch.roles == ROLE_PROMPT].sum()) * self._options.prefill_us_per_token / 1e6
        if seconds:
            time.sleep(seconds)

    def _sample(self, batch: ForwardBatch, surplus: NDArray[np.bool_]) -> tuple[Int32Array, UInt8Array, list[TokenLogprobs | None]]:
        """(rows,): tokens, or -1; and statuses. Of each token: its logprobs."""
        status = np.where(surplus, STATUS_NAN, STATUS_OK).astype(np.uint8)
        sampled = np.full(batch.num_rows, -1, dtype=np.int32)
        logprobs: list[TokenLogprobs | None] = []
        for r, (row, want) in enumerate(zip(batch.req_pool_idx.tolist(), batch.wants.tolist(), strict=True)):
            if want != WANT_SAMPLE or status[r] == STATUS_NAN:
                continue
            script = self._rows[row]
            token = script.next_token()
            if token == self._options.crash_token:
                os.kill(os.getpid(), signal.SIGKILL)
            if token == self._options.raise_token:
                raise RuntimeError("scripted failure of a step")
            if token == self._options.nan_token:
                status[r] = STATUS_NAN
                continue
            sampled[r] = token
            logprobs.append(scripted_logprobs(script.params, script.length, token) if script.params.return_logprob else None)
            script.append(token)
        return sampled, status, logprobs

    # ---- the contract ----

    def _verify(self, batch: ForwardBatch, input_ids: Int32Array, surplus: NDArray[np.bool_]) -> None:
        rows = batch.num_rows
        if not (len(batch.prefix_lens) == len(batch.seq_lens) == len(batch.roles) == len(batch.wants) == rows > 0):
            raise ScriptViolation("row arrays of different lengths")
        if rows > self.info.max_batch_rows or len(set(batch.req_pool_idx.tolist())) != rows:
            raise ScriptViolation("too many rows, or one twice")
        if (np.diff(batch.row_splits) != batch.seq_lens - batch.prefix_lens).any() or batch.row_splits[-1] != len(input_ids):
            raise ScriptViolation("row_splits disagree with lengths")
        for group in batch.groups:
            if len(np.unique(group.out_cache_loc)) != len(input_ids):
                raise ScriptViolation("two tokens are written to one slot")
        self._copy(batch)
        for r in range(rows):
            self._write(batch, input_ids, r)
        for r in np.flatnonzero(~surplus).tolist():
            self._read(batch, r)

    def _copy(self, batch: ForwardBatch) -> None:
        """Pages go to where one row each begins within them; how much of them is its own, `_read` finds out."""
        for group, kv in zip(batch.groups, self._kv, strict=True):
            if len(group.copied_from) != len(group.copied_to) or len(group.copied_to) != len(batch.groups[0].copied_to):
                raise ScriptViolation("pages are copied from as many as they are copied to, in all groups")
            if not len(group.copied_to):
                continue
            page = self.info.page_size
            if np.concatenate([group.copied_from, group.copied_to]).min() < 0 or (group.copied_from % page).any():
                raise ScriptViolation("what is copied are pages")
            begun = {
                int(group.req_to_token[row, prefix // page * page])
                for row, prefix in zip(batch.req_pool_idx.tolist(), batch.prefix_lens.tolist(), strict=True)
                if prefix % page
            }
            to = set(group.copied_to.tolist())
            if len(to) != len(group.copied_to) or not begun.issuperset(to) or not to.isdisjoint(group.copied_from.tolist()):
                raise ScriptViolation("a page is copied to where no row begins, or twice, or copied on")
            kv[:, slots_of_pages(group.copied_to, page)] = kv[:, slots_of_pages(group.copied_from, page)]

    def _write(self, batch: ForwardBatch, input_ids: Int32Array, r: int) -> None:
        """Row r's tokens go where `out_cache_loc` says, which must be where the table says that they are."""
        start, end = int(batch.prefix_lens[r]), int(batch.seq_lens[r])
        if end <= start or end > self.info.max_context_len:
            raise ScriptViolation(f"a row of positions {start}..{end}")
        span = slice(int(batch.row_splits[r]), int(batch.row_splits[r + 1]))
        for group, kv in zip(batch.groups, self._kv, strict=True):
            out = group.out_cache_loc[span]
            if (group.req_to_token[batch.req_pool_idx[r], start:end] != out).any():
                raise ScriptViolation("out_cache_loc disagrees with req_to_token")
            kv[0, out] = input_ids[span]
            kv[1, out] = np.arange(start, end)
            kv[2, out] = batch.roles[r]

    def _read(self, batch: ForwardBatch, r: int) -> None:
        """The slots of what row r sees hold exactly its tokens; and it samples exactly at their end."""
        row, end = int(batch.req_pool_idx[r]), int(batch.seq_lens[r])
        script = self._rows.get(row)
        if script is None:
            raise ScriptViolation(f"row {row} isn't bound")
        if end > script.length or (int(batch.wants[r]) == WANT_SAMPLE) != (end == script.length):
            raise ScriptViolation(f"row {row} reads {end} of {script.length} tokens, wants {batch.wants[r]}")
        prompt_len = len(script.prompt)
        role = ROLE_PROMPT if batch.prefix_lens[r] < prompt_len else ROLE_GENERATED
        if batch.roles[r] != role or (role == ROLE_PROMPT and end > prompt_len):
            raise ScriptViolation("tokens in the wrong role")
        for group, window, kv in zip(batch.groups, self.info.group_windows, self._kv, strict=True):
            start = first_seen(int(batch.prefix_lens[r]), window)
            token, position, written = kv[:, group.req_to_token[row, start:end]]
            if (token != script.tokens[start:end]).any() or (position != np.arange(start, end)).any():
                raise ScriptViolation(f"row {row}: its context isn't what its slots hold")
            if not self.info.reuse_generated_kv and (written != (np.arange(start, end) >= prompt_len)).any():
                raise ScriptViolation(f"row {row}: its context was computed in another role")


def create(args: ServerArgs, folder: Path) -> Executor:
    """Made from the settings and the model's facts; opens no weights. Raises ConfigError for options that don't exist."""
    options = ScriptOptions.parse(args.executor_options)
    num_slots = args.max_total_tokens or DEFAULT_NUM_SLOTS
    info = ExecutorInfo(
        name="scripted",
        dtype="none",
        device="none",
        group_slots=tuple((options.window_slots or num_slots) if window else num_slots for window in options.windows),
        group_windows=tuple(window or None for window in options.windows),
        page_size=args.page_size,
        max_batch_rows=options.max_batch_rows,
        max_context_len=args.context_length or ModelConfig.load(folder).context_len,
        reuse_generated_kv=bool(options.reuse_generated_kv),
        exactness="bitwise",
        kv_bytes_per_token=24,
        overlap=bool(options.overlap),
    )
    return ScriptedExecutor(info, options)
