"""The HTTP server: uvicorn with its signal handling taken out, and deadlines and a header limit put in."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sterna.config.server_args import ServerArgs
from sterna.server.app import App
from sterna.server.errors import ErrorDetail, ErrorResponse
from sterna.server.freed_memory import keep_thresholds
from sterna.server.joined_writes import JoinedWrites

BACKLOG = 4096
"""Connections that the system holds until they are accepted, if it allows so many."""
KEEP_ALIVE_S = 75
"""An idle connection is closed after this long; longer than the minute that proxies keep theirs."""
HEADER_DEADLINE_S = 20.0
"""From a connection's or a request's first sign to its last header."""
BODY_DEADLINE_S = 300.0
"""From the last header to the last byte of the body."""
BODY_IDLE_S = 30.0
"""Between two parts of a body."""
WRITE_STALL_S = 120.0
"""That a client may take to read what waits to be sent to it (some 64 KB) before it counts as gone. Meanwhile its stream writes nothing;
what its request goes on to say is merged into one delta, which the request's own length bounds."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request's first line and headers, as they are sent; of trailers, and of whatever else a body may have between its parts, as well."""
MAX_HEADERS = 256
DATE_INTERVAL_S = 1.0
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
GRACE_S = 5
"""Seconds that `shutdown` leaves to responses that are still being written."""


MAX_CONNECTIONS = 65_536
"""Open files that the server asks for. Often it is given 1,024 and may have far more; a burst beyond them is cut off unanswered."""


def raise_file_limit() -> None:
    """As far as this user may, up to `MAX_CONNECTIONS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems have a limit behind the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HTTPServer:
    """Serves `app` on `listener`, a bound and listening socket that it takes over.

    Lifecycle: `startup`, `shutdown`. Signals are the caller's.
    """

    def __init__(self, app: App, args: ServerArgs, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=DeadlineProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._app = app
        self._server = _Uvicorn(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        """Returns when connections are being answered."""
        raise_file_limit()
        keep_thresholds()
        started = asyncio.Event()
        self._server.on_started = started
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        waiter = asyncio.create_task(started.wait())
        await asyncio.wait({self._task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._task.done():
            await self._task

    async def shutdown(self, grace_s: int = GRACE_S) -> None:
        """Stop listening, let responses in progress end (`grace_s` at most), close every connection and the app."""
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.stop.set()
        if self._task is not None:
            await self._task
        self._app.shutdown()

    def hurry(self) -> None:
        """Let a `shutdown` that is waiting for responses wait no longer."""
        self._server.force_exit = True


class _Uvicorn(uvicorn.Server):
    """Ends on an event of ours instead of a signal, and sleeps on it instead of polling."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()
        self.on_started: asyncio.Event | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        if self.on_started is not None:
            self.on_started.set()
        while not self.stop.is_set():
            await self.on_tick(0)  # renews the Date header
            try:
                await asyncio.wait_for(self.stop.wait(), DATE_INTERVAL_S)
            except TimeoutError:
                continue


def _without_upgrade(data: bytes) -> bytes:
    """A request's head with its `Upgrade` header put out of the parser's sight.

    RFC 9110, 7.8: a server may ignore it. The parser would drop the body of a request that has one, and Java's HTTP client sends
    `Upgrade: h2c` with every first request.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"x-ignored-upgrade:", head) + end + body


class _TooLarge(Exception):
    """Headers over the limit."""


class DeadlineProtocol(HttpToolsProtocol):
    """Closes connections that send nothing, or send slowly for ever, or send headers without end, or never read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._header_bytes: int | None = 0
        """Bytes since the connection or the request before it; None while a body or nothing is being read."""
        self._between_bytes = 0
        """Bytes of a body's message that were read since its last part: chunk sizes, trailers."""
        self._refused = False
        """What comes further is not read: the connection closes when the requests before it are answered."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered. uvicorn's `cycle` is the latest one that came, pipelined behind it perhaps."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._writes = JoinedWrites(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._writes))
        self._set_deadline(HEADER_DEADLINE_S)

    def eof_received(self) -> None:
        self._writes.flush()  # the transport closes when this returns

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        self._clear_stall()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        elif self._idle is not None:
            self._idle.cancel()
            self._idle = self.loop.call_later(BODY_IDLE_S, self._late)
            self._between_bytes += len(data)
        if self._idle is None and not self.pipeline:  # no body is being read: a request's headers, or their rest
            data = _without_upgrade(data)
        super().data_received(data)
        # Still no end of the headers: whole reads are counted, so that no more is held than the limit and one read.
        if (self._between_bytes if self._header_bytes is None else self._header_bytes) > MAX_HEADER_BYTES:
            self._refuse_headers()
        elif self._rests() and self._deadline is None and self.timeout_keep_alive_task is None:
            self._set_deadline(HEADER_DEADLINE_S)  # nothing that begins a request came: an empty line, which ends uvicorn's own timer

    def _rests(self) -> bool:
        """Whether nothing is being read or answered."""
        return self._header_bytes is None and (self.cycle is None or self.cycle.response_complete)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_bytes is None:
            self._header_bytes = 0
            self._set_deadline(HEADER_DEADLINE_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._header_bytes is not None:  # otherwise it is a trailer: uvicorn would let it pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        # They may all have come in one read.
        sent = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if sent > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_headers()
            raise _TooLarge  # stops the parser
        self._header_bytes = None
        self._between_bytes = 0
        self._set_deadline(BODY_DEADLINE_S)
        self._idle = self.loop.call_later(BODY_IDLE_S, self._late)
        super().on_headers_complete()
        if self.pipeline:
            self._clear()  # it waits for the answer before it; `on_response_complete` goes on
        else:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._between_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing() and self._deadline is None:
            self._set_deadline(BODY_DEADLINE_S)

    def on_message_complete(self) -> None:
        self._clear()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Who never reads would hold a request's place for ever.
        self._stall = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._clear_stall()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _set_deadline(self, seconds: float) -> None:
        self._clear()
        self._deadline = self.loop.call_later(seconds, self._late)

    def _clear(self) -> None:
        for timer in (self._deadline, self._idle):
            if timer is not None:
                timer.cancel()
        self._deadline = self._idle = None

    def _clear_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _unanswered(self) -> bool:
        """Whether the request that is being read could still be answered, with no other's answer in the way."""
        if self.cycle is None:
            return True
        if self._header_bytes is not None:
            return bool(self.cycle.response_complete)
        return not self.cycle.response_started and not self.pipeline

    def _late(self) -> None:
        self._refuse(408, "the request took too long to arrive", "request_timeout")

    def _refuse_headers(self) -> None:
        self._refuse(431, "the request's headers are too large", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer what the app can't see, unless an answer has begun, and close; or close when the requests before it are answered."""
        self._clear()
        if self.transport.is_closing() or self._refused:
            return
        before = self._answering
        if before is not None and not before.response_complete and (before is not self.cycle or self._header_bytes is not None):
            self._refused = True
            if self.pipeline and self._header_bytes is None:
                self.pipeline.popleft()  # the refused one itself, whose body was being read
            last = self.pipeline[0][0] if self.pipeline else before
            last.keep_alive = False
            return
        if self._unanswered():
            body = msgspec.json.encode(ErrorResponse(ErrorDetail(message, "invalid_request_error", None, code)))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
