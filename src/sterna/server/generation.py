"""What every generating surface does between its own hop 2 and its own hop 9: take a place, dispatch, read the journals, let them go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from sterna.config.server_args import ServerArgs
from sterna.errors import DuplicateRid, RequestError
from sterna.protocol.finish import FinishAbort, FinishReason
from sterna.protocol.generate import GenerateReqInput
from sterna.server.errors import error_of, rename_param, to_http
from sterna.server.exchange import ClientGone, Exchange
from sterna.server.request_log import Origin, RequestLog
from sterna.server.sse import SseStream
from sterna.tokenizer_manager.manager import TokenizerManager
from sterna.tokenizer_manager.req_state import Admission, JournalReader, OutputDelta, aborted


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

    def __init__(self, manager: TokenizerManager, request_log: RequestLog) -> None:
        self.manager = manager
        self._log = request_log
        self._fan_outs: dict[str, list[str]] = {}
        """rid of a list of prompts -> the rids that its members run under."""

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
    ) -> AsyncIterator[Outputs]:
        """Take `count` places, convert (hop 2, off the event loop), dispatch (hop 3); every journal is closed at the end of the block.

        Places come first: a refusal for load costs neither template nor tokenizer. `rid` is the client's name for all of it; `params` says
        what the surface calls the core's fields.
        Raises RequestError, OverloadedError, EngineError; ClientGone at the moment when the client goes.
        """
        outputs = Outputs(params)
        places = Places(self.manager, count)
        try:
            async with exchange.until_gone():
                objs = await self.manager.run_blocking(convert)
                with self._named(rid, objs):
                    for obj in objs:
                        outputs.readers.append(await self._start(exchange, obj, places.take(), user))
                    yield outputs
        except RequestError as error:
            raise rename_param(error, params) from None
        finally:
            outputs.close()
            places.close()

    @contextmanager
    def _named(self, rid: str, objs: list[GenerateReqInput]) -> Iterator[None]:
        """Remember which rids the members of a list run under. Raises DuplicateRid."""
        if rid in self._fan_outs:
            raise DuplicateRid(f"a request with rid {rid!r} is running", param="rid")
        if [obj.rid for obj in objs] == [rid]:
            yield
            return
        self._fan_outs[rid] = [obj.rid for obj in objs]
        try:
            yield
        finally:
            del self._fan_outs[rid]

    async def _start(self, exchange: Exchange, obj: GenerateReqInput, admission: Admission, user: str | None) -> JournalReader:
        origin = Origin(exchange.route, exchange.request_id, user, obj.stream)
        self._log.begin(obj.rid, origin)
        exchange.registered = True
        try:
            return await self.manager.generate_request(obj, admission)
        except BaseException as fault:
            exchange.registered = not isinstance(fault, DuplicateRid)
            admission.close()
            self._log.drop(obj.rid, origin)
            raise

    def abort(self, rid: str) -> int:
        """End the request, or all members of the list, that a client calls `rid`; how many there were."""
        return sum(self.manager.abort_request(member) for member in [*self._fan_outs.get(rid, ()), rid])


class Outputs:
    """The journals of one HTTP request, read as one."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self.readers: list[JournalReader] = []
        self._params = params
        self._merge: _Merge | None = None

    async def next(self) -> tuple[int, OutputDelta]:
        """The index of a prompt, and what its journal gained. Raises what a refusal, a fault or a timeout of the request stands for.

        Loses nothing when it is cancelled and called again.
        """
        if len(self.readers) == 1:
            index, delta = 0, await self.readers[0].next_delta()
        else:
            if self._merge is None:
                self._merge = _Merge(self.readers)
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

    def close(self) -> None:
        if self._merge is not None:
            self._merge.close()
        for reader in self.readers:
            reader.close()


class _Merge:
    """Deltas of several journals in the order in which they come.

    A journal isn't read on before its last delta has been dealt with: until then it merges what it gets, and its reader's counts are those
    of that delta.
    """

    def __init__(self, readers: list[JournalReader]) -> None:
        self._queue: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
        self._dealt_with = [asyncio.Event() for _ in readers]
        self._last: int | None = None
        self._pumps = [asyncio.create_task(self._pump(index, reader)) for index, reader in enumerate(readers)]

    async def next(self) -> tuple[int, OutputDelta]:
        if self._last is not None:
            self._dealt_with[self._last].set()
            self._last = None
        index, delta = await self._queue.get()
        if isinstance(delta, Exception):
            raise delta
        self._last = index
        return index, delta

    async def _pump(self, index: int, reader: JournalReader) -> None:
        dealt_with = self._dealt_with[index]
        try:
            delta = await reader.next_delta()
            while delta.finished_reason is None:
                self._queue.put_nowait((index, delta))
                await dealt_with.wait()
                dealt_with.clear()
                delta = await reader.next_delta()
            self._queue.put_nowait((index, delta))
        except Exception as fault:
            self._queue.put_nowait((index, fault))

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()


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
