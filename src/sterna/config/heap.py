"""What was freed inside the heap goes back to the system."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give the free pages inside the heap back. By itself glibc returns the heap's end only, and one string that still lives keeps all that
    lies below it. About 10 ms for 50 MB, in which no other thread can allocate.

    Besides where large requests end, every process does it when it has loaded its tokenizer, which takes twice what it keeps.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
