import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sterna.mem_cache.allocator import OutOfSlots, PagedAllocator, SlotError, SlotPools


@given(st.integers(1, 9), st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_pages_are_aligned_distinct_and_never_lost(page_size: int, num_pages: int, actions: list[tuple[bool, int]]) -> None:
    allocator = PagedAllocator(num_pages * page_size + page_size - 1, page_size)
    held: list[np.ndarray] = []
    for allocate, size in actions:
        if allocate:
            if size * page_size > allocator.available:
                with pytest.raises(OutOfSlots):
                    allocator.alloc(size)
                continue
            slots = allocator.alloc(size)
            pages = slots.reshape(size, page_size)
            assert (pages[:, 0] % page_size == 0).all()
            assert (pages == pages[:, :1] + np.arange(page_size)).all()
            held.append(slots)
        elif held:
            allocator.free(held.pop(size % len(held)))
        in_use = np.concatenate([*held, np.zeros(0, dtype=np.int32)])
        everything = np.concatenate([in_use, allocator.free_slots()])
        assert sorted(everything.tolist()) == list(range(num_pages * page_size))
        assert allocator.available + len(in_use) == allocator.total


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda slots: slots[:3], id="part of a page"),
        pytest.param(lambda slots: slots + 1, id="not aligned"),
        pytest.param(lambda slots: slots[::-1].copy(), id="out of order"),
        pytest.param(lambda slots: np.concatenate([slots, slots]), id="twice in one call"),
        pytest.param(lambda slots: slots + 400, id="beyond the pool"),
        pytest.param(lambda slots: slots - 400, id="before the pool"),
    ],
)
def test_slots_that_cannot_be_given_back_change_nothing(wrong: object) -> None:
    allocator = PagedAllocator(40, 4)
    slots = allocator.alloc(3)
    with pytest.raises(SlotError):
        allocator.free(wrong(slots))  # type: ignore[operator]
    assert allocator.available == 28
    allocator.free(slots)
    assert allocator.available == 40


def test_a_double_free_is_detected() -> None:
    allocator = PagedAllocator(40, 4)
    slots = allocator.alloc(1)
    allocator.free(slots)
    with pytest.raises(SlotError):
        allocator.free(slots)


def test_groups_are_allocated_together_or_not_at_all() -> None:
    pools = SlotPools((32, 32), 4)
    first, second = pools.alloc(2)
    assert len(first) == len(second) == 8
    pools.groups[1].alloc(5)
    with pytest.raises(OutOfSlots):
        pools.alloc(2)
    assert [group.available for group in pools.groups] == [24, 4]
    pools.free((first, second))
    assert [group.available for group in pools.groups] == [32, 12]
