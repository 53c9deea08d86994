"""What every generating surface does between its own hop 2 and its own hop 9: take a place, dispatch, read the journals, let them go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from sterna.config.server_args import ServerArgs
from sterna.errors import RequestError
from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import GenerateReqInput
from sterna.server.errors import error_of, rename_param, to_http
from sterna.server.exchange import ClientGone, Exchange
from sterna.server.logprobs import LogprobSink
from sterna.server.openai.fields import usage_of
from sterna.server.sse import SseStream
from sterna.server.threads import BoundedThreads
from sterna.tokenizer_manager.admission import Admission, Terms
from sterna.tokenizer_manager.fan_out import JournalMerge
from sterna.tokenizer_manager.manager import TokenizerManager
from sterna.tokenizer_manager.req_state import AbortCause, JournalReader, Origin, OutputDelta, aborted

BYTES_PER_TOKEN = 4
"""Of a request's body, before its prompt is tokenized."""


class Places:
    """One admission per prompt of an HTTP request. `close` gives back those that no journal has taken over."""

    def __init__(self, admissions: Sequence[Admission]) -> None:
        self.admissions = admissions

    @asynccontextmanager
    async def until_ended(self) -> AsyncIterator[None]:
        """Raise what ends the request from outside (a timeout, an eviction) out of the block, at that moment.

        It is for the time before there are journals to say so. An abort isn't raised: it is answered with an output, as any other.
        """
        task = asyncio.current_task()
        assert task is not None
        over: FinishAbort | None = None

        def end(reason: FinishAbort) -> None:
            nonlocal over
            if over is None and not aborted(reason):
                over = reason
                task.cancel()

        cancelling = task.cancelling()
        for admission in self.admissions:
            admission.on_end = end
        try:
            yield
        except asyncio.CancelledError:
            if over is not None and task.uncancel() <= cancelling:
                raise error_of(over) from None
            raise
        finally:
            for admission in self.admissions:
                if admission.on_end is end:
                    admission.on_end = None

    def close(self) -> None:
        for admission in self.admissions:
            if admission.rid is None:
                admission.close()


class Generations:
    """Starts and reads generating requests for all surfaces. One per app."""

    def __init__(self, manager: TokenizerManager) -> None:
        self.manager = manager

    @asynccontextmanager
    async def run(
        self,
        exchange: Exchange,
        rid: str,
        count: int,
        convert: Callable[[], list[GenerateReqInput]],
        *,
        terms: Terms,
        user: str | None,
        params: Mapping[str, str],
        threads: BoundedThreads | None = None,
    ) -> AsyncIterator[Outputs]:
        """Take `count` places, convert (hop 2, off the event loop), dispatch (hop 3); every journal is closed at the end of the block.

        `threads` are those that a slow `convert` has for itself; without them it runs where prompts are tokenized.

        Places come first: a refusal for load costs neither template nor tokenizer. `rid` is the client's name for all of it, and so is the
        request id; `params` says what the surface calls the core's fields.
        Raises RequestError, OverloadedError, TimedOut, EngineError; ClientGone at the moment when the client goes.
        """
        outputs = Outputs(params)
        places = Places([])
        manager = self.manager
        try:
            places.admissions = manager.admit_all(terms, count, exchange.body_bytes // BYTES_PER_TOKEN)
            with manager.claims.claimed({rid, exchange.request_id}, places.admissions):
                async with exchange.until_gone(), AsyncExitStack() as names:
                    async with places.until_ended():
                        objs = await (manager.run_blocking if threads is None else threads.run)(convert)
                        names.enter_context(manager.named(rid, [obj.rid for obj in objs]))
                        origin = Origin(exchange.route, exchange.request_id, rid, user, objs[0].stream)
                        outputs.readers += await self._start(exchange, objs, places.admissions, origin)
                    yield outputs
        except RequestError as error:
            raise rename_param(error, params) from None
        except ClientGone:
            outputs.close("client_gone")
            raise
        finally:
            outputs.close()
            places.close()

    async def _start(
        self, exchange: Exchange, objs: list[GenerateReqInput], admissions: Sequence[Admission], origin: Origin
    ) -> list[JournalReader]:
        starting = self.manager.generate_batch(objs, admissions, origin)
        exchange.registered = True
        return await starting


class Outputs:
    """The journals of one HTTP request, read as one."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self.readers: list[JournalReader] = []
        self._params = params
        self._merge: JournalMerge | None = None
        self._fault: Exception | None = None
        """What the next call of `next` raises."""

    async def next(self) -> tuple[int, OutputDelta]:
        """The index of a prompt, and what its journal gained. Raises what a refusal, a fault or a timeout of the request stands for, once
        all output before it has been given out.

        Loses nothing when it is cancelled and called again.
        """
        if self._fault is not None:
            raise self._fault
        if len(self.readers) == 1:
            index, delta = 0, await self.readers[0].next_delta()
        else:
            if self._merge is None:
                self._merge = JournalMerge(self.readers)
            index, delta = await self._merge.next()
        if isinstance(delta.finished_reason, FinishAbort) and not aborted(delta.finished_reason):
            error = error_of(delta.finished_reason)
            self._fault = rename_param(error, self._params) if isinstance(error, RequestError) else error
            if not delta.output_ids and not delta.text:
                raise self._fault
            return index, OutputDelta(delta.text, delta.output_ids, None, delta.logprobs)
        return index, delta

    async def all(self, sinks: Sequence[LogprobSink | None]) -> list[Full]:
        """Wait for every journal's end. Raises as `next` does.

        `sinks`, one per prompt, get the logprobs as they come; None for a prompt that asked for none.
        """
        chunks: list[list[str]] = [[] for _ in self.readers]
        ids: list[list[int]] = [[] for _ in self.readers]
        reasons: dict[int, FinishReason] = {}
        while len(reasons) < len(self.readers):
            index, delta = await self.next()
            chunks[index].append(delta.text)
            ids[index] += delta.output_ids
            sink = sinks[index]
            if sink is not None:
                sink.add(delta.output_ids, delta.logprobs)
            if delta.finished_reason is not None:
                reasons[index] = delta.finished_reason
        return [Full("".join(chunks[i]), ids[i], reasons[i], reader) for i, reader in enumerate(self.readers)]

    def mark_first_byte(self) -> None:
        for reader in self.readers:
            reader.mark_first_byte()

    def close(self, cause: AbortCause = "request_failed") -> None:
        """Nobody reads on; those that haven't finished end, for `cause`. Idempotent."""
        if self._merge is not None:
            self._merge.close()
        for reader in self.readers:
            reader.close(cause)


@dataclass(slots=True, frozen=True)
class Full:
    """A whole output."""

    text: str
    output_ids: list[int]
    finished_reason: FinishReason
    reader: JournalReader
    """For its counts and times."""


class Chunks(Protocol):
    """A surface's stream (hop 9): turns deltas into the bytes of events."""

    def delta(self, index: int, delta: OutputDelta, reader: JournalReader) -> bytes:
        """Events for what prompt `index` gained; empty where there is nothing to say."""

    def end(self, readers: list[JournalReader]) -> bytes:
        """What follows the last delta: usage, `[DONE]`."""

    def held(self, readers: list[JournalReader]) -> bytes:
        """Events for what the prompts have gained and `delta` kept for later, where no later delta comes."""


async def write_stream(exchange: Exchange, outputs: Outputs, chunks: Chunks, args: ServerArgs) -> None:
    """Send `outputs` as server-sent events until all have finished, or as an error."""
    sse = SseStream(exchange, commit_after=args.sse_commit_after, keep_alive=args.sse_keep_alive)
    readers = outputs.readers
    unfinished = len(readers)
    try:
        while unfinished:
            index, delta = await sse.wait_for(outputs.next)
            data = chunks.delta(index, delta, readers[index])
            if delta.finished_reason is not None:
                unfinished -= 1
                if not unfinished:
                    data += chunks.end(readers)
            if data:
                await sse.send(data, more=unfinished > 0)
                readers[index].mark_first_byte()
    except ClientGone:
        raise
    except Exception as fault:
        await sse.fail(to_http(fault), usage_of(readers), chunks.held(readers))
    finally:
        sse.close()
