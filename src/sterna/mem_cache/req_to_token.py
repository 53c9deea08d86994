"""Which slot holds which position of whom: one int32 table per KV group, shared read-only with the executor."""

from __future__ import annotations

import numpy as np

from sterna.mem_cache.allocator import SlotArrays


class ReqToToken:
    """Rows are lent to requests (`req_pool_idx`); column = position. Slots are written a page at a time, so the width is whole pages."""

    def __init__(self, num_rows: int, max_context: int, page_size: int, num_groups: int) -> None:
        width = -(-max_context // page_size) * page_size
        self.tables: SlotArrays = tuple(np.zeros((num_rows, width), dtype=np.int32) for _ in range(num_groups))
        """(num_rows, width) each. What lies beyond a row's allocated length means nothing."""
        self.num_rows = num_rows
        self.width = width
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc_row(self) -> int:
        """Raises IndexError where none is free."""
        return self._free.pop()

    def free_row(self, row: int) -> None:
        self._free.append(row)

    def read(self, row: int, start: int, end: int) -> SlotArrays:
        """Copies: the row may be lent to somebody else next."""
        return tuple(table[row, start:end].copy() for table in self.tables)

    def write(self, row: int, start: int, slots: SlotArrays) -> None:
        for table, own in zip(self.tables, slots, strict=True):
            table[row, start : start + len(own)] = own
