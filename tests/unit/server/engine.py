"""A real `TokenizerManager` whose scheduler and detokenizer are a script: what a test says is what the engine answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from byte_model import EOS, IM_END, VOCAB_SIZE, tokenizer_json
from model_facts import model_facts
from sterna.config.model_config import GenerationDefaults
from sterna.config.server_args import ServerArgs
from sterna.errors import InvalidRequest
from sterna.protocol.channels import ToScheduler
from sterna.protocol.control import FlushCacheOutput, FlushCacheReq, LiveReq, LookUpOutput, LookUpReq, ProcessReady
from sterna.protocol.finish import FinishAbort, FinishLength, FinishReason
from sterna.protocol.generate import (
    AbortReq,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    SchedulerTimes,
    StrRow,
    TokenizedGenerateReqInput,
)
from sterna.protocol.logprobs import TokenLogprobs
from sterna.protocol.sampling import SamplingParams
from sterna.server.app import App, create_app
from sterna.text.tokenizer import Tokenizer
from sterna.tokenizer_manager.manager import TokenizerManager
from unit.tokenizer_manager.fakes import FakeInbox

CONTEXT_LEN = 64
GENERATION = GenerationDefaults(temperature=0.2, top_p=0.9)


class FakeTemplate:
    """ChatML without the newlines; raises on the word RAISE, as templates do."""

    source = ""

    def __init__(self) -> None:
        self.kwargs: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        self.messages, self.kwargs = messages, kwargs
        text = "".join(f"[{m['role'][0]}]{m['content']}" for m in messages)
        if "RAISE" in text:
            raise InvalidRequest("the chat template refused: roles must alternate", param="messages")
        return text + ("[a]" if kwargs["add_generation_prompt"] else "")


class Engine:
    """Plays the scheduler and the detokenizer. Set `script` to what it does with a dispatched request."""

    def __init__(self, *, template: Any = None, context_len: int = CONTEXT_LEN, **args: Any) -> None:
        self.args = ServerArgs(model="bytes", context_length=context_len, **args)
        self.inbox = FakeInbox()
        self.script: Callable[[Engine, TokenizedGenerateReqInput], Awaitable[None]] = answer("hello", " world")
        self.received: list[TokenizedGenerateReqInput] = []
        self.batches: list[list[str]] = []
        """Rids of each fan-out that came as one message."""
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.live: dict[str, LiveReq] = {}
        """What the scheduler says of live requests when it is asked."""
        self._positions: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        model = model_facts(vocab_size=VOCAB_SIZE, context_len=context_len, eos_token_ids=(EOS, IM_END), generation=GENERATION)
        self.template = FakeTemplate() if template is None else template
        self.manager = TokenizerManager(
            self.args, model, Tokenizer.from_json(tokenizer_json()), self.template or None, self.inbox, self, epoch=1
        )
        self.app: App = create_app(self.manager, self.args)

    # what the manager sends to: the scheduler's inbox
    def send(self, message: ToScheduler) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self._take(message)
            case BatchTokenizedGenerateReqInput():
                self.batches.append([member.rid for member in message.reqs])
                for member in message.reqs:
                    self._take(member)
            case AbortReq():
                self.aborted.append(message.rid)
                self._tasks[message.rid].cancel()
                self.put(message.rid, "", reason=FinishAbort("aborted", 499, "aborted"), ids=0)
                self.abort_seen.set()
            case FlushCacheReq():
                self.inbox.put(FlushCacheOutput(control_id=message.control_id, flushed_tokens=7))
            case LookUpReq():
                found = [self.live[rid] for rid in message.rids if rid in self.live]
                self.inbox.put(LookUpOutput(control_id=message.control_id, reqs=found))
            case _:
                pass

    def _take(self, request: TokenizedGenerateReqInput) -> None:
        self.received.append(request)
        self._positions[request.rid] = 0
        self._tasks[request.rid] = asyncio.get_running_loop().create_task(self.script(self, request))

    def put(
        self,
        rid: str,
        text: str,
        *,
        reason: FinishReason | None = None,
        ids: int | list[int] | None = None,
        cached: int = 2,
        with_logprobs: bool = True,
    ) -> None:
        """One row: `text` in as many tokens as it has bytes, or in `ids` (or so many); with logprobs where the request asks for them."""
        start = self._positions.get(rid, 0)
        output_ids = list(text.encode()) if ids is None else list(range(ids)) if isinstance(ids, int) else ids
        self._positions[rid] = start + len(output_ids)
        request = next(request for request in self.received if request.rid == rid)
        params = request.sampling_params
        logprobs = [logprobs_at(start + i, token, params) for i, token in enumerate(output_ids)]
        shown = logprobs if params.return_logprob and with_logprobs else None
        times = SchedulerTimes(0.0, 1.0, 2.0, 3.0) if reason is not None else None
        row = StrRow(rid, start, output_ids, text, reason, len(request.input_ids), cached, times, shown)
        self.inbox.put(BatchStrOutput(epoch=1, detokenized_time=4.0, rows=[row]))


def logprobs_at(index: int, token: int, params: SamplingParams) -> TokenLogprobs:
    """What this engine says of output token `index`: no two places have the same. Powers of two survive float32."""
    top = range(params.top_logprobs_num)
    return TokenLogprobs.pack(
        -(index + 1) / 8,
        [token - i for i in top],
        [-(index + 1) / 8 - i for i in top],
        [-(index + 1) / 8 - i / 2 for i in params.token_ids_logprob],
    )


def answer(*texts: str, reason: FinishReason | None = None) -> Callable[[Engine, TokenizedGenerateReqInput], Awaitable[None]]:
    """Each text as a row of its own, then the end."""

    async def play(engine: Engine, request: TokenizedGenerateReqInput) -> None:
        for index, text in enumerate(texts):
            last = index == len(texts) - 1
            total = sum(len(entry.encode()) for entry in texts)
            engine.put(request.rid, text, reason=(reason or FinishLength(total)) if last else None)
            await asyncio.sleep(0)

    return play


async def silence(engine: Engine, request: TokenizedGenerateReqInput) -> None:
    """No answer, ever."""


@contextlib.asynccontextmanager
async def running(*, ready: bool = True, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine(**options)
    engine.manager.startup()
    if ready:
        for process in ("scheduler", "detokenizer"):
            engine.inbox.put(ProcessReady(process=process, epoch=1, info={"executor": "scripted"}))
        await engine.manager.ready_event.wait()
    try:
        yield engine
    finally:
        engine.app.shutdown()
        engine.manager.shutdown()
        engine.inbox.close()
