"""What one turn of the scheduler's loop costs the host: choose, build the batch, take the results, build and encode the output.

In process, over the scripted executor, whose own time is subtracted; no sockets. Prints one line of JSON per case and a summary:
microseconds per turn by running rows, and by length of the waiting queue behind a full batch. Then what is left of that beside an executor
whose steps take a while in a thread of their own: in turn, and submitted before the last one is read.

    python bench/scheduler_step.py [--steps 300] [--repeats 5] [--step-ms 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sterna.config.model_config import ModelConfig
from sterna.config.server_args import ServerArgs
from sterna.executor.base import Executor, ForwardBatch, Int32Array, StepHandle
from sterna.executor.scripted import create
from sterna.protocol.channels import ToScheduler, ToServer
from sterna.protocol.control import OutputCredit
from sterna.protocol.generate import BatchTokenIDOutput, TokenizedGenerateReqInput
from sterna.protocol.sampling import SamplingParams
from sterna.scheduler.process import create_scheduler
from sterna.scheduler.scheduler import Scheduler
from sterna.text.tokenizer import Tokenizer

CONTEXT_LEN = 8192
PROMPT_TOKENS = 40


class TimedExecutor(Executor):
    """Keeps its own time, to be subtracted."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.info = inner.info
        self.seconds = 0.0

    def bind(self, req_pool_idx: int, params: SamplingParams, prompt: Int32Array, output: Int32Array) -> None:
        self.inner.bind(req_pool_idx, params, prompt, output)

    def release(self, req_pool_idx: int) -> None:
        self.inner.release(req_pool_idx)

    def submit(self, batch: ForwardBatch) -> StepHandle:
        began = time.perf_counter()
        handle = self.inner.submit(batch)
        self.seconds += time.perf_counter() - began
        return handle

    def shutdown(self) -> None:
        self.inner.shutdown()


class Loop:
    """Inbox and outbox in one: every batch is encoded, as for a socket, and its credit comes back at once."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []
        self.encoder = msgspec.msgpack.Encoder()
        self.encoded_bytes = 0

    def wait(self, timeout_ms: int | None = None) -> bool:
        return bool(self.messages)

    def drain(self, limit: int = 1_000_000) -> Iterator[ToScheduler]:
        taken, self.messages = self.messages[:limit], self.messages[limit:]
        yield from taken

    def to_detokenizer(self, message: BatchTokenIDOutput) -> None:
        self.encoded_bytes += len(self.encoder.encode(message))
        self.messages.append(OutputCredit(batches=1))

    def to_server(self, address: str | None, message: ToServer) -> None:
        self.encoder.encode(message)


def no_tokenizer() -> Tokenizer:
    raise AssertionError("no request here has text stops")


def make(running: int, loop: Loop, options: str) -> tuple[Scheduler, TimedExecutor]:
    model = ModelConfig(
        name="scripted",
        source="",
        family="llama",
        weights_dtype="none",
        num_parameters=0,
        vocab_size=50_000,
        context_len=CONTEXT_LEN,
        bos_token_id=None,
        eos_token_ids=(0,),
    )
    args = ServerArgs(
        executor="scripted",
        executor_options=f"verify=0,{options}",
        context_length=CONTEXT_LEN,
        max_running_requests=running,
        max_queued_requests=1_000_000,
        max_total_tokens=2_000_000,
        chunked_prefill_size=0,
    )
    executor = TimedExecutor(create(args, Path()))
    return create_scheduler(args, model, executor, loop, loop, epoch=1, tokenizer=no_tokenizer), executor


def start(running: int, waiting: int, options: str = "") -> tuple[Scheduler, TimedExecutor]:
    """With `running` streams decoding and `waiting` requests queued behind them."""
    loop = Loop()
    scheduler, executor = make(running, loop, options)
    for i in range(running + waiting):
        loop.messages.append(
            TokenizedGenerateReqInput(
                rid=f"request-{i}",
                input_ids=[1 + (i * 31 + k) % 40_000 for k in range(PROMPT_TOKENS)],
                sampling_params=SamplingParams(max_new_tokens=CONTEXT_LEN - PROMPT_TOKENS),
                stream=True,
                reply_to="ipc://server",
            )
        )
    while len(scheduler.reqs) < running + waiting or len(scheduler.running) < running:
        scheduler.receive()
        scheduler.step()
    return scheduler, executor


def measure(running: int, waiting: int, steps: int, repeats: int) -> dict[str, float | int]:
    """Microseconds per turn."""
    scheduler, executor = start(running, waiting)
    per_turn: list[float] = []
    for _ in range(repeats):
        executor.seconds = 0.0
        began = time.perf_counter()
        for _ in range(steps):
            scheduler.receive()
            scheduler.step()
        per_turn.append((time.perf_counter() - began - executor.seconds) / steps * 1e6)
    best = min(per_turn)
    return {
        "running": running,
        "waiting": waiting,
        "us_per_turn": round(best, 1),
        "us_per_turn_median": round(statistics.median(per_turn), 1),
        "us_per_row": round(best / running, 2),
    }


def measure_beside(running: int, step_ms: float, steps: int, repeats: int) -> dict[str, float | int]:
    """Microseconds per turn beyond the step's own, which is the same in both: in turn, and overlapped."""
    beyond: dict[str, float | int] = {"running": running, "step_ms": step_ms}
    for name, overlap in (("us_beyond_step_in_turn", 0), ("us_beyond_step_overlapped", 1)):
        scheduler, _ = start(running, 0, f"threaded=1,overlap={overlap},step_ms={step_ms}")
        per_turn: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(steps):
                scheduler.receive()
                scheduler.step()
            per_turn.append((time.perf_counter() - began) / steps * 1e6 - step_ms * 1e3)
        beyond[name] = round(min(per_turn), 1)
        scheduler.shutdown()
    return beyond


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=4.0)
    options = parser.parse_args()
    by_running = [measure(rows, 0, options.steps, options.repeats) for rows in (1, 4, 16, 64, 128, 256)]
    by_waiting = [measure(64, queue, options.steps, options.repeats) for queue in (0, 100, 1_000, 10_000)]
    beside = [measure_beside(rows, options.step_ms, options.steps // 3, options.repeats) for rows in (1, 16, 64, 256)]
    for case in by_running + by_waiting + beside:
        print(json.dumps(case))
    print(
        json.dumps(
            {
                "us_per_turn_at_64_rows": by_running[3]["us_per_turn"],
                "turn_256_rows_over_64_rows": round(by_running[5]["us_per_turn"] / by_running[3]["us_per_turn"], 2),
                "turn_10000_waiting_over_none": round(by_waiting[3]["us_per_turn"] / by_waiting[0]["us_per_turn"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
