"""Cosine and sine of rotary embedding's angles: the engine's own, against NumPy's in the longest float that this machine has."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native

FloatArray = NDArray[np.float32]
MOST = 2.0**29
FREQUENCIES: FloatArray = (10_000.0 ** -np.linspace(0, 1, 64)).astype(np.float32)


def assert_near(angles: FloatArray) -> None:
    """Within 1 ulp of float32, and nearly all of them the nearest float32."""
    cosines, sines = _native.kernels.turns(angles)
    for ours, exact in ((cosines, np.cos(angles.astype(np.longdouble))), (sines, np.sin(angles.astype(np.longdouble)))):
        nearest = exact.astype(np.float32)
        assert np.all(np.abs(ours - exact) <= np.spacing(np.abs(nearest)))
        assert np.mean(ours == nearest) > 0.9999


@pytest.mark.parametrize("base", [0, 1000, 100_000, 1_000_000])
def test_every_position_turns_as_it_should(base: int) -> None:
    positions = np.arange(base, base + 2000, dtype=np.float32)
    assert_near(np.multiply.outer(positions, FREQUENCIES).ravel())


def test_any_angle_turns_as_it_should() -> None:
    random = np.random.RandomState(1)
    angles = (MOST ** random.uniform(-1, 1, 200_000) * random.choice([-1, 1], 200_000)).astype(np.float32)
    assert_near(angles)


def test_angles_next_to_quarter_turns_lose_nothing_to_cancellation() -> None:
    quarters = (np.arange(1, 200_000, dtype=np.float64) * (np.pi / 2)).astype(np.float32)
    assert_near(np.concatenate([quarters, np.nextafter(quarters, np.float32(0)), np.nextafter(quarters, np.float32(np.inf))]))


def test_the_ends() -> None:
    assert_near(np.array([0, -0.0, 1e-30, MOST, -MOST], dtype=np.float32))
    cosines, sines = _native.kernels.turns(
        np.array([0, np.nextafter(np.float32(MOST), np.float32(np.inf)), np.inf, np.nan], dtype=np.float32)
    )
    assert (cosines[0], sines[0]) == (1, 0)
    assert np.isnan(cosines[1:]).all()
    assert np.isnan(sines[1:]).all()


def test_bits_are_the_same_on_every_system() -> None:
    """Kept from one system: no libm has a say."""
    angles = (np.arange(1, 100_001, dtype=np.float32) * np.float32(0.7)).astype(np.float32)
    cosines, sines = _native.kernels.turns(angles)
    assert (
        hashlib.sha256(cosines.tobytes() + sines.tobytes()).hexdigest()
        == "3276c7a7b720377f80fd35652e791d114d8473899a2003ea6fcd543d116a0872"
    )
