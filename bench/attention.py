"""Speed of the native attention kernel on one core: `python bench/attention.py [isa ...]`.

Prompt-like calls (many queries over a span that stays in the cache) in multiply-adds a second; decode-like calls (the queries of
one key head over keys read from memory) in bytes of keys and values a second. Other programs share the machine, so what counts is
the best of several rounds, or the quickest quarter of short pieces of memory.
"""

import sys

import numpy as np
from numpy.typing import NDArray

from sterna.executor.native import _native

kernels = _native.kernels
SPAN = 256
MEMORY_BYTES = 256 << 20  # more than any cache holds
PIECES = 128


def aligned_pages(pages: int, head_dim: int) -> NDArray[np.uint8]:
    """Pages of bfloat16 numbers near one, aligned as the engine's are."""
    size = pages * head_dim * 64
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    data = raw[start : start + size]
    data.view(np.uint16)[:] = 0x3F80
    return data.reshape(pages, -1)


def seconds(isa: str, queries: int, head_dim: int, pages: NDArray[np.uint8], rounds: int) -> float:
    q = np.full((queries, head_dim), 0x3E00, np.uint16)
    positions = np.full(queries, len(pages) * 16, np.int32)
    return float(kernels.time_attend(isa, q, positions, pages, head_dim, rounds))


def main() -> None:
    for isa in sys.argv[1:] or ["avx512", "avx2"]:
        for head_dim in (64, 128):
            span = aligned_pages(SPAN // 16, head_dim)
            for queries in (16, 24, 48, 96):
                taken = seconds(isa, queries, head_dim, span, 200)
                print(f"{isa} prompt  head_dim {head_dim:3} queries {queries:2}: {2 * queries * SPAN * head_dim / taken / 1e9:6.1f} GMAC/s")
            memory = aligned_pages(MEMORY_BYTES // (head_dim * 64), head_dim)
            for queries in (1, 3, 4, 8):
                pieces = [seconds(isa, queries, head_dim, piece, 1) for _ in range(2) for piece in np.split(memory, PIECES)]
                rate = memory.nbytes / PIECES / np.quantile(pieces, 0.25)
                print(f"{isa} decode  head_dim {head_dim:3} queries {queries:2}: {rate / 1e9:6.1f} GB/s")


if __name__ == "__main__":
    main()
