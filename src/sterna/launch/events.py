"""Waiting for whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(timeout_s: float | None, *events: Coroutine[Any, Any, object]) -> None:
    """Wait until one of `events` has happened, or the time is over; the others are given up."""
    waits = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
