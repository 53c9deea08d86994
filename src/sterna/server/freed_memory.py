"""What a large body took goes back to the system when it is freed."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from sterna.config.heap import trim

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
THRESHOLD_BYTES = 128 * 1024
"""glibc's own, before it adapts."""
LARGE_BYTES = 1 << 16
"""Of a body. What smaller ones take is used again by the next."""
BODY_BYTES = 1 << 20
"""Of large bodies, all together, after which there is something to give back."""
PAUSE_S = 5.0
"""From there to the giving back: their requests are mostly over by then, and it is done at most so often."""


def keep_thresholds() -> bool:
    """Fix the sizes from which the allocator returns memory, and let all threads share one heap. False where it is another allocator than
    glibc's, which needs nothing here. To be called before there are threads.

    glibc raises those sizes up to 64 MB with each large block that is freed: a few bodies of megabytes, and the process keeps for good
    what the largest of them took. A heap per thread keeps it once for each thread that tokenized one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((M_MMAP_THRESHOLD, THRESHOLD_BYTES), (M_TRIM_THRESHOLD, THRESHOLD_BYTES), (M_ARENA_MAX, 1))
    return all(mallopt(option, value) == 1 for option, value in options)


class FreedMemory:
    """Trims the heap some time after large bodies have come. Used from one event loop."""

    def __init__(self, give_back: Callable[[], object] = trim) -> None:
        self._give_back = give_back
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def released(self, body_bytes: int) -> None:
        """A request is over whose body had that size."""
        if body_bytes >= LARGE_BYTES:
            self._bytes += body_bytes
        if self._bytes >= BODY_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._act)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _act(self) -> None:
        self._timer = None
        self._bytes = 0
        asyncio.get_running_loop().run_in_executor(None, self._give_back)
