"""The checksum of packed weights: what csrc/pack/checksum.h says, for any number of threads, never the same after a small change."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native

MIB = 1 << 20
ALL = (1 << 64) - 1
RANDOM: NDArray[np.uint8] = np.random.RandomState(3).randint(0, 256, 5 * MIB + 77).astype(np.uint8)


def step(total: int, word: int) -> int:
    mixed = total ^ word
    return (mixed << 29 | mixed >> 35) * 0x9E3779B97F4A7C15 & ALL


def reference(data: bytes) -> int:
    total = len(data)
    for start in range(0, len(data), MIB):
        chunk = data[start : start + MIB]
        words = struct.unpack(f"<{-(-len(chunk) // 64) * 8}Q", chunk.ljust(-(-len(chunk) // 64) * 64, b"\0"))
        for lane in range(8):
            mixed = 0xD1342543DE82EF95 * (lane + 1) & ALL
            for word in words[lane::8]:
                mixed = step(mixed, word)
            total = step(total, mixed)
    return total


@pytest.mark.parametrize("size", [0, 1, 8, 63, 64, 65, 1000, MIB - 1, MIB, MIB + 1, 2 * MIB + 64])
def test_it_is_what_its_contract_says(size: int) -> None:
    assert _native.checksum(RANDOM[:size], 1) == reference(RANDOM[:size].tobytes())


def test_the_number_of_threads_changes_nothing() -> None:
    assert len({_native.checksum(RANDOM, threads) for threads in (1, 2, 3, 7, 100)}) == 1


def test_one_changed_bit_is_noticed_wherever_it_is() -> None:
    data = RANDOM[: MIB + 200].copy()
    before = _native.checksum(data, 1)
    for bit in range(0, 8 * data.size, 80_021):
        data[bit // 8] ^= 1 << bit % 8
        assert _native.checksum(data, 1) != before
        data[bit // 8] ^= 1 << bit % 8
    assert _native.checksum(data, 1) == before


@pytest.mark.parametrize("distance", [8, 64, 512, MIB])
def test_two_changed_bits_dont_make_up_for_each_other(distance: int) -> None:
    """A multiplication alone would only ever carry upwards, so that two highest bits of a lane would."""
    data = RANDOM[: 2 * MIB].copy()
    before = _native.checksum(data, 1)
    for bit in range(64):
        for word in (0, 8 * 100):
            for at in (word, word + distance):
                data[at + bit // 8] ^= 1 << bit % 8
            assert _native.checksum(data, 1) != before
            for at in (word, word + distance):
                data[at + bit // 8] ^= 1 << bit % 8


def test_order_and_length_count() -> None:
    swapped = np.concatenate([RANDOM[MIB : 2 * MIB], RANDOM[:MIB]])
    zeros = np.zeros(256, dtype=np.uint8)
    found = [_native.checksum(each, 1) for each in (RANDOM[: 2 * MIB], swapped, zeros[:64], zeros[:128], zeros[:60], zeros)]
    assert len(set(found)) == len(found)
