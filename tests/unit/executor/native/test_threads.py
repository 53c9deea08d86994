"""The compute threads: every item of a loop once, and what goes wrong in one of them comes out where the loop was called."""

from __future__ import annotations

import pytest

from sterna.executor.native import _native


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_each_item_is_run_once(threads: int, count: int) -> None:
    pool = _native.kernels.ThreadPool(threads)
    for _ in range(50):
        assert pool.each(count) == [1] * count


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("failing", [0, 500, 999])
def test_a_fault_in_one_item_ends_the_loop_and_not_the_process(threads: int, failing: int) -> None:
    pool = _native.kernels.ThreadPool(threads)
    for _ in range(20):
        with pytest.raises(MemoryError):
            pool.each(1000, failing)
        assert pool.each(1000) == [1] * 1000
