"""What a large body took goes back to the system when it is freed."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
THRESHOLD_BYTES = 128 * 1024
"""glibc's own, before it adapts."""


def give_freed_memory_back() -> bool:
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
