"""The scheduler process: sockets around a `Scheduler`, and how one is made from settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from sterna.config.heap import trim
from sterna.config.model_config import ModelConfig
from sterna.config.process_start import ProcessStart, enter_process
from sterna.config.server_args import ServerArgs
from sterna.executor.base import Executor
from sterna.executor.registry import create_executor
from sterna.ipc.channel import Receiver, Sender
from sterna.mem_cache.allocator import SlotPools
from sterna.mem_cache.chunk_cache import ChunkCache
from sterna.mem_cache.prefix_cache import PrefixCache
from sterna.mem_cache.radix_cache import RadixCache
from sterna.mem_cache.req_to_token import ReqToToken
from sterna.protocol.channels import ToDetokenizer, ToScheduler, ToServer
from sterna.protocol.control import ProcessReady
from sterna.protocol.generate import BatchTokenIDOutput
from sterna.scheduler.decode import RunningBatch
from sterna.scheduler.intake import IntakeLimits
from sterna.scheduler.kv import KVLedger
from sterna.scheduler.policy import SchedulePolicy
from sterna.scheduler.prefill import Prefill
from sterna.scheduler.results import ResultTaker
from sterna.scheduler.scheduler import Inbox, Outbox, Scheduler
from sterna.scheduler.step import StepRunner
from sterna.scheduler.warm_up import first_forward
from sterna.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class SocketOutbox:
    """Senders to the detokenizer and to whichever server asks for a reply."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], detokenizer: str, server: str) -> None:
        self._context = context
        self._server = server
        self._detokenizer: Sender[ToDetokenizer] = Sender(context, detokenizer)
        self._servers: dict[str, Sender[ToServer]] = {}

    def to_detokenizer(self, message: BatchTokenIDOutput) -> None:
        self._detokenizer.send(message)

    def replace_detokenizer(self, address: str) -> None:
        self._detokenizer.close(linger_ms=0)
        self._detokenizer = Sender(self._context, address)

    def to_server(self, address: str | None, message: ToServer) -> None:
        address = address or self._server
        sender = self._servers.get(address)
        if sender is None:
            sender = self._servers[address] = Sender(self._context, address)
        sender.send(message)

    def close(self) -> None:
        self._detokenizer.close()
        for sender in self._servers.values():
            sender.close()


def create_scheduler(
    args: ServerArgs,
    model: ModelConfig,
    executor: Executor,
    inbox: Inbox,
    outbox: Outbox,
    *,
    epoch: int,
    tokenizer: Callable[[], Tokenizer],
    check_every_slot: bool = False,
) -> Scheduler:
    """A scheduler over `executor`, which it shuts down at its end. `tokenizer` is called when a request with text stops comes;
    `check_every_slot`, for tests, raises InvariantViolation after any step that leaves a slot without exactly one owner."""
    info = executor.info
    context_len = min(model.context_len, info.max_context_len)
    max_rows = min(args.max_running_requests, info.max_batch_rows)
    pools = SlotPools(info.group_slots, info.page_size, info.group_windows)
    tables = ReqToToken(max_rows, context_len, info.page_size, len(info.group_slots))
    cache: PrefixCache = RadixCache(pools) if args.radix_cache else ChunkCache(len(info.group_slots))
    ledger = KVLedger(pools, tables, cache, reuse_generated_kv=info.reuse_generated_kv)
    policy = SchedulePolicy(args.schedule_policy, cache, priority_ageing_s=args.priority_ageing)
    running = RunningBatch(max_rows)
    return Scheduler(
        executor=executor,
        ledger=ledger,
        prefill=Prefill(ledger, policy, chunk_size=args.chunked_prefill_size, max_rows=max_rows),
        running=running,
        runner=StepRunner(executor, ledger, running, ResultTaker(ledger, model.vocab_size, frozenset(model.eos_token_ids))),
        limits=IntakeLimits(model.vocab_size, context_len, pools.longest_request, args.stream_interval),
        max_queued_requests=args.max_queued_requests,
        inbox=inbox,
        outbox=outbox,
        tokenizer=tokenizer,
        epoch=epoch,
        check_every_slot=check_every_slot,
    )


class LazyTokenizer:
    """The model's tokenizer and its tables (`Tokenizer.table`), made when first asked for, by whichever thread that is; others wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Tokenizer:
        """Raises ModelError where the folder's can't be read; the next call tries again."""
        with self._lock:
            if self._tokenizer is None:
                tokenizer = Tokenizer.load(self._folder)
                for skip_special_tokens in (True, False):
                    tokenizer.table(skip_special_tokens=skip_special_tokens)
                trim()
                self._tokenizer = tokenizer
            return self._tokenizer

    def warm(self) -> threading.Thread:
        """Make it in a thread: in the event loop it would hold up every request for as long as half a second.

        The thread isn't a daemon: it calls a library that must not be cut off by the interpreter's end.
        """
        thread = threading.Thread(target=self._try, name="tokenizer")
        thread.start()
        return thread

    def _try(self) -> None:
        try:
            self()
        except Exception:
            log.exception("the tokenizer can't be loaded: requests with stop strings will fail")


def run_scheduler(start: ProcessStart) -> None:
    """Serve until told to stop. Raises what the executor raises when it can't be made."""
    args, folder = start.args, Path(start.folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Receiver[ToScheduler] = Receiver(context, start.inbox, ToScheduler)
    executor = create_executor(args, folder)
    outbox = SocketOutbox(context, start.detokenizer, start.server)
    try:
        model = ModelConfig.load(folder)
        tokenizer = LazyTokenizer(folder)
        scheduler = create_scheduler(args, model, executor, inbox, outbox, epoch=start.epoch, tokenizer=tokenizer)
        first_forward(executor, scheduler.ledger.tables, model.bos_token_id or 0)
        scheduler.publish()  # the first gauge: whoever is told that we are ready has one
        outbox.to_server(None, ProcessReady(process="scheduler", epoch=start.epoch, info=_describe(executor, scheduler)))
        tokenizer.warm()
        scheduler.main_loop()
    finally:
        outbox.close()
        inbox.close()
        context.term()


def _describe(executor: Executor, scheduler: Scheduler) -> dict[str, str | int | float | bool]:
    """What `/server_info` says of it."""
    info = executor.info
    facts: dict[str, str | int | float | bool] = {
        "executor": info.name,
        "dtype": info.dtype,
        "device": info.device,
        "exactness": info.exactness,
        "kv_total_tokens": scheduler.ledger.pools.total,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "kv_group_slots": " + ".join(map(str, info.group_slots)),
        "page_size": info.page_size,
        "max_running_requests": scheduler.prefill.max_rows,
        "reuse_generated_kv": info.reuse_generated_kv,
    }
    return facts | info.details


if __name__ == "__main__":
    enter_process("scheduler", run_scheduler)
