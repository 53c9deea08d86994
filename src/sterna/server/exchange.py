"""One HTTP request and its response, over raw ASGI."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from sterna.errors import OverloadedError, PayloadTooLarge
from sterna.server.errors import Header, HttpError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"
LARGE_PIECE = 64 * 1024
"""Bytes of a body, from which on its making and sending is broken up."""
# What may be echoed into a header and a log line.
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client closed its connection: not an error, and nobody is left to be answered."""


class BodyBudget:
    """Bytes of request bodies that the server holds at one moment, all exchanges together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, count: int) -> None:
        """Raises OverloadedError where the limit is reached."""
        if self.held + count > self.limit:
            raise OverloadedError("too many request bodies are being received")
        self.held += count

    def give(self, count: int) -> None:
        self.held -= count


class Exchange:
    """Reads one request, writes one response."""

    __slots__ = (
        "_budget",
        "_held",
        "_max_body",
        "_receive",
        "_send",
        "body_bytes",
        "path_params",
        "received",
        "registered",
        "request_id",
        "route",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int, budget: BodyBudget) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._max_body = max_body_bytes
        self._budget = budget
        self._held = 0
        self.body_bytes = 0
        """Of the body, as far as it has been read."""
        self.received = time.monotonic()
        self.request_id = _request_id(self.header(b"x-request-id"))
        self.route = ""
        """The path as the route table has it; empty until one is found."""
        self.path_params: dict[str, str] = {}
        self.registered = False
        """A generating request was handed to the manager, whose observers will log its end."""
        self.status: int | None = None
        """Of the response, once its status line is out."""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return next(iter(self.headers(name)), None)

    def headers(self, name: bytes) -> list[bytes]:
        """Every header of that (lower-case) name."""
        return [bytes(value) for key, value in self.scope["headers"] if key == name]

    async def body(self) -> bytes:
        """The whole request body. Raises PayloadTooLarge as soon as the limit is certain to be passed, OverloadedError, ClientGone."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > self._max_body:
            raise self._too_large()
        chunks: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            if self._held + len(chunk) > self._max_body:
                raise self._too_large()
            self._budget.take(len(chunk))
            self._held += len(chunk)
            self.body_bytes = self._held
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._max_body} bytes")

    @asynccontextmanager
    async def until_gone(self) -> AsyncIterator[None]:
        """Raise ClientGone out of the block at the moment when the client goes. Enter it after the body has been read.

        The disconnect is raced against whatever the block awaits, as `asyncio.timeout` races a clock; it costs nothing per event.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        cancelling = task.cancelling()
        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() <= cancelling:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def start(self, status: int, headers: list[Header]) -> None:
        """Send the status line."""
        self.status = status
        headers.append((b"x-request-id", self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: list[Header] | None = None) -> None:
        length = str(len(body)).encode()
        await self.start(status, [(b"content-type", content_type), (b"content-length", length), *(headers or [])])
        await self.write(body, more=False)

    async def respond_json(self, value: object, status: int = 200) -> None:
        await self.respond(status, msgspec.json.encode(value))

    async def respond_pieces(self, pieces: Iterable[bytes]) -> None:
        """200, and a JSON body that is made as it is asked for: where a piece is large, others have their turn before the next."""
        parts: list[bytes] = []
        for piece in pieces:
            parts.append(piece)
            if len(piece) > LARGE_PIECE:
                await asyncio.sleep(0)
        if sum(map(len, parts)) <= LARGE_PIECE:
            parts = [b"".join(parts)]
        await self.start(200, [(b"content-type", JSON), (b"content-length", str(sum(map(len, parts))).encode())])
        for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
            await self.write(part, more=left > 0)

    async def respond_error(self, error: HttpError) -> None:
        await self.respond(error.status, error.body, headers=error.headers)

    def release_body(self) -> None:
        """The body has been decoded, or given up: its bytes no longer count."""
        self._budget.give(self._held)
        self._held = 0


def _request_id(given: bytes | None) -> str:
    """The client's own where it is fit to be echoed, a new one otherwise."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return uuid.uuid4().hex
