"""`KeyedHeap` against a list that is sorted anew each time."""

import random

import pytest

from sterna.keyed_heap import SLACK, KeyedHeap


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_sorted_list_whoever_comes_moves_and_leaves(seed: int) -> None:
    rng = random.Random(seed)
    heap, model = KeyedHeap[str, int](), list[tuple[int, int, str]]()
    for count in range(600):
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.6:
            place = rng.randrange(10)
            heap.put(key, place)
            model = [entry for entry in model if entry[2] != key] + [(place, count, key)]
        else:
            assert heap.discard(key) == any(entry[2] == key for entry in model)
            model = [entry for entry in model if entry[2] != key]
        model.sort()
        assert list(heap) == [entry[2] for entry in model]
        assert heap.first() == ((model[0][2], model[0][0]) if model else None)
        assert len(heap) == len(model)
        assert (key in heap) == any(entry[2] == key for entry in model)


def test_those_that_left_from_the_middle_dont_pile_up() -> None:
    heap = KeyedHeap[int, int]()
    heap.put(-1, -1)
    for key in range(10_000):
        heap.put(key, key)
        heap.discard(key)
    assert len(heap._heap) <= 2 * len(heap) + SLACK + 1
    for key in range(10_000):
        heap.put(key, key)
    for key in range(10_000):
        heap.discard(key)
    assert len(heap._heap) <= 2 * len(heap) + SLACK + 1


def test_the_first_is_not_compared_by_its_key() -> None:
    heap = KeyedHeap[object, float]()
    first, second = object(), object()
    heap.put(first, 1.0)
    heap.put(second, 1.0)
    assert heap.first() == (first, 1.0)
    heap.clear()
    assert heap.first() is None
