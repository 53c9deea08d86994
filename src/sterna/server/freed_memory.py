"""What a large body took goes back to the system when it is freed."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
THRESHOLD_BYTES = 128 * 1024
"""glibc's own, before it adapts."""


def give_freed_memory_back() -> bool:
    """Fix the sizes from which the allocator returns memory. False where it is another one than glibc's, which needs nothing here.

    glibc doubles them up to 64 MB with each large block that is freed: a few bodies of megabytes, and the process keeps for good what the
    largest of them took, several times over where threads had their part in it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, THRESHOLD_BYTES) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
