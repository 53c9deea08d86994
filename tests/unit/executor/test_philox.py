"""The random stream: its published vectors, its definition, and the torch engine's agreement with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sterna.executor.philox import NOISE_MAX, NOISE_MIN, philox4x32, sampling_noise
from sterna.executor.torch.gumbel import block_noise

VECTORS = [
    # `kat_vectors` of the Random123 distribution, philox4x32 10.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key).tolist() == list(expected)


def test_the_noise_is_the_documented_function_of_seed_index_and_id() -> None:
    seed, index = 0x0123456789ABCDEF, 77
    noise = sampling_noise(seed, index, [0, 5, 49151])
    for at, token in enumerate((0, 5, 49151)):
        word = int(philox4x32((token // 4, index, 0, 0), (0x89ABCDEF, 0x01234567))[token % 4])
        uniform = ((word >> 8) + 0.5) / 2**24
        assert noise[at] == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


def test_the_noise_stays_in_its_bounds_at_the_ends_of_the_uniform_range() -> None:
    assert pytest.approx(-math.log(-math.log(0.5 / 2**24)), rel=1e-12) == NOISE_MIN
    assert pytest.approx(-math.log(-math.log((2**24 - 0.5) / 2**24)), rel=1e-9) == NOISE_MAX


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
def test_the_torch_engine_draws_the_same_noise(seed: int) -> None:
    blocks = np.array([0, 1, 2, 12287, 2**20])
    for index in (0, 1, 8191):
        ones = torch.ones(len(blocks), dtype=torch.int64)
        ours = block_noise(ones * (seed & 0xFFFFFFFF), ones * (seed >> 32), ones * index, torch.from_numpy(blocks)).numpy()
        reference = sampling_noise(seed, index, (4 * blocks[:, None] + np.arange(4)).ravel()).reshape(ours.shape)
        np.testing.assert_array_max_ulp(ours, reference, maxulp=1)


def test_the_noise_has_the_gumbel_distribution() -> None:
    noise = np.sort(
        np.concatenate([sampling_noise(seed, index, np.arange(5000)) for seed in range(4) for index in range(5)]).astype(np.float64)
    )
    ranks = (np.arange(len(noise)) + 0.5) / len(noise)
    distance = np.abs(np.exp(-np.exp(-noise)) - ranks).max()
    assert distance < 1.63 / math.sqrt(len(noise))  # Kolmogorov-Smirnov at 1%; the draws are fixed
