"""What every generating surface does between its own hop 2 and its own hop 9: take a place, dispatch, read the journals, let them go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from sterna.config.server_args import ServerArgs
from sterna.errors import RequestError
from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import GenerateReqInput
from sterna.server.errors import error_of, rename_param, to_http
from sterna.server.exchange import ClientGone, Exchange
from sterna.server.sse import SseStream
from sterna.server.threads import BoundedThreads
from sterna.tokenizer_manager.fan_out import JournalMerge
from sterna.tokenizer_manager.manager import TokenizerManager
from sterna.tokenizer_manager.req_state import AbortCause, Admission, JournalReader, Origin, OutputDelta, aborted


class Places:
    """One admission per prompt of an HTTP request. Those that no journal has taken over go back at `close`."""

    def __init__(self, manager: TokenizerManager, count: int) -> None:
        """Raises QueueFull, OverloadedError or EngineDead; then none is held."""
        self._held: list[Admission] = []
        try:
            for _ in range(count):
                self._held.append(manager.admit())
        except BaseException:
            self.close()
            raise

    def take(self) -> Admission:
        return self._held.pop()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()


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
        user: str | None,
        params: Mapping[str, str],
        threads: BoundedThreads | None = None,
    ) -> AsyncIterator[Outputs]:
        """Take `count` places, convert (hop 2, off the event loop), dispatch (hop 3); every journal is closed at the end of the block.

        `threads` are those that a slow `convert` has for itself; without them it runs where prompts are tokenized.

        Places come first: a refusal for load costs neither template nor tokenizer. `rid` is the client's name for all of it; `params` says
        what the surface calls the core's fields.
        Raises RequestError, OverloadedError, EngineError; ClientGone at the moment when the client goes.
        """
        outputs = Outputs(params)
        places = Places(self.manager, count)
        try:
            async with exchange.until_gone():
                objs = await (self.manager.run_blocking if threads is None else threads.run)(convert)
                with self.manager.named(rid, [obj.rid for obj in objs]):
                    origin = Origin(exchange.route, exchange.request_id, rid, user, objs[0].stream)
                    outputs.readers += await self._start(exchange, objs, [places.take() for _ in objs], origin)
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
        self, exchange: Exchange, objs: list[GenerateReqInput], admissions: list[Admission], origin: Origin
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

    async def next(self) -> tuple[int, OutputDelta]:
        """The index of a prompt, and what its journal gained. Raises what a refusal, a fault or a timeout of the request stands for.

        Loses nothing when it is cancelled and called again.
        """
        if len(self.readers) == 1:
            index, delta = 0, await self.readers[0].next_delta()
        else:
            if self._merge is None:
                self._merge = JournalMerge(self.readers)
            index, delta = await self._merge.next()
        if isinstance(delta.finished_reason, FinishAbort) and not aborted(delta.finished_reason):
            error = error_of(delta.finished_reason)
            raise rename_param(error, self._params) if isinstance(error, RequestError) else error
        return index, delta

    async def all(self) -> list[Full]:
        """Wait for every journal's end. Raises as `next` does."""
        chunks: list[list[str]] = [[] for _ in self.readers]
        ids: list[list[int]] = [[] for _ in self.readers]
        reasons: dict[int, FinishReason] = {}
        while len(reasons) < len(self.readers):
            index, delta = await self.next()
            chunks[index].append(delta.text)
            ids[index] += delta.output_ids
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
        await sse.fail(to_http(fault))
    finally:
        sse.close()
