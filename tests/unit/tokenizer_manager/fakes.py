"""A scheduler and a detokenizer that are lists, so that a test plays them."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from byte_model import VOCAB_SIZE, tokenizer_json
from model_facts import model_facts
from sterna.config.server_args import ServerArgs
from sterna.protocol.channels import ToScheduler, ToServer
from sterna.protocol.control import ProcessReady
from sterna.protocol.generate import BatchStrOutput, GenerateReqInput, StrRow
from sterna.protocol.sampling import SamplingParams
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.admission import ANY_TERMS, Accounts, Admission, Terms
from sterna.tokenizer_manager.manager import TokenizerManager
from sterna.tokenizer_manager.req_state import JournalReader


class FakeInbox:
    """Readable like a socket; `put` is what another process would send."""

    address = "ipc://server"

    def __init__(self) -> None:
        self._messages: list[ToServer] = []
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    @property
    def fd(self) -> int:
        return self._read.fileno()

    def put(self, message: ToServer) -> None:
        self._messages.append(message)
        with contextlib.suppress(BlockingIOError):  # full is readable enough
            self._write.send(b"x")

    def drain(self, limit: int = 1_000_000) -> Iterator[ToServer]:
        with contextlib.suppress(BlockingIOError):
            self._read.recv(1 << 16)
        for _ in range(min(limit, len(self._messages))):
            yield self._messages.pop(0)

    def close(self) -> None:
        self._read.close()
        self._write.close()


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[ToScheduler] = []

    def send(self, message: ToScheduler) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[ToScheduler]:
        return [message for message in self.sent if isinstance(message, kind)]


MODEL = model_facts(vocab_size=VOCAB_SIZE, context_len=64)


class ManagerWithFakes:
    """A ready manager; use it inside a running loop and `close` it there."""

    def __init__(self, **args: Any) -> None:
        self.inbox = FakeInbox()
        self.scheduler = FakeSender()
        self.manager = TokenizerManager(
            ServerArgs(**args), MODEL, Tokenizer.from_json(tokenizer_json()), None, self.inbox, self.scheduler, epoch=1
        )
        self.manager.startup()
        for process in ("scheduler", "detokenizer"):
            self.inbox.put(ProcessReady(process=process, epoch=1, info={}))

    async def ready(self) -> "ManagerWithFakes":
        await self.manager.ready_event.wait()
        return self

    def admit(self, terms: Terms = ANY_TERMS) -> Admission:
        """A place for one."""
        (admission,) = self.manager.admit_all(terms)
        return admission

    async def generate(self, obj: GenerateReqInput, admission: Admission) -> JournalReader:
        """Hop 3 of a request that runs alone."""
        (reader,) = await self.manager.generate_batch([obj], [admission])
        return reader

    def close(self) -> None:
        self.manager.shutdown()
        self.inbox.close()


def request(
    rid: str = "r", text: str = "hello", max_new_tokens: int | None = 4, *, return_logprob: bool = False, **fields: object
) -> GenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, return_logprob=return_logprob)
    return GenerateReqInput(rid=rid, text=text, sampling_params=params, **fields)


def a_place() -> Admission:
    """For a `ReqState` of its own."""
    return Accounts(ServerArgs()).admit(ANY_TERMS)[0]


def scenario(test: Callable[[ManagerWithFakes], Awaitable[None]], **args: Any) -> None:
    """Run `test` with a ready manager in a loop of its own."""

    async def run() -> None:
        group = await ManagerWithFakes(**args).ready()
        try:
            await test(group)
        finally:
            group.close()

    asyncio.run(run())


def output(*rows: StrRow, epoch: int = 1) -> BatchStrOutput:
    return BatchStrOutput(epoch=epoch, detokenized_time=0.0, rows=list(rows))


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def pass_time(manager: TokenizerManager, seconds: float) -> None:
    """For deadlines it is `seconds` later from now on, and those that are over by then act."""
    deadlines = manager.accounts.deadlines
    clock = deadlines._clock
    deadlines._clock = lambda: clock() + seconds
    deadlines._fire()
