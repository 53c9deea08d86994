"""An ASGI client that sees every message when it is sent, and can go away at any moment."""

import asyncio
import json
from typing import Any

from sterna.server.app import App


class Call:
    """One request in progress."""

    def __init__(self, app: App, method: str, path: str, body: bytes, headers: dict[str, str], *, chunk: int | None = None) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self._gone = asyncio.Event()
        step = chunk or max(1, len(body))
        self._parts = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        path, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": query.encode()}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert self.status is None, "two status lines"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status is not None, "a body before its status line"
            self.body += message["body"]
        self.sent.put_nowait(message)

    def disconnect(self) -> None:
        self._gone.set()

    async def next_message(self) -> dict[str, Any]:
        """The next thing that the app sends."""
        return await asyncio.wait_for(self.sent.get(), 30)

    async def done(self) -> "Call":
        await asyncio.wait_for(self.task, 30)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Data of the SSE events: parsed JSON, or the string `[DONE]`."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def start(app: App, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, chunk: int | None = None) -> Call:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Call(app, method, path, data, headers or {}, chunk=chunk)


async def post(app: App, path: str, body: Any = None, **options: Any) -> Call:
    return await start(app, "POST", path, body, **options).done()


async def get(app: App, path: str, **options: Any) -> Call:
    return await start(app, "GET", path, **options).done()
