"""Waiting for whichever comes first."""

from __future__ import annotations

import asyncio


async def first_of(timeout_s: float | None, *events: asyncio.Event) -> None:
    """Wait until one of `events` is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
