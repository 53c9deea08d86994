"""A response's head and what follows it at once go out as one packet."""

from __future__ import annotations

import asyncio
from typing import Any

HEAD = b"HTTP/1.1 "


class JoinedWrites:
    """A transport that keeps a head back until the next write, or until the loop comes round again.

    ASGI sends head and body apart, and uvicorn writes each when it comes: two system calls, two packets, and a client that is woken twice.
    Where all of them share a machine's cores with the model, that is felt. A body that begins like a head is kept back as well, which
    changes nothing for its reader.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            self._transport.write(self._held + data)
            self._held = b""
        elif data.startswith(HEAD):
            self._held = data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send what is kept back now: the transport is about to close, or the loop has come round."""
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)
