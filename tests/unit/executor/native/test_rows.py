"""Rows: right against float64, and the same bits on every instruction set that this machine has."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unit.executor.native.lanes_reference import ISAS, SIZES, Floats, bits, kernels, ulps

rng = np.random.default_rng(3)


def row(n: int, spread: float = 1.0) -> Floats:
    return (rng.standard_normal(n) * spread).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_is_the_formula(isa: str, n: int) -> None:
    x, weight = row(n, 3), row(n)
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2) + 1e-5) * weight
    np.testing.assert_allclose(kernels.rms_norm(isa, x, weight, 1e-5), want, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_sums_and_scales_are_rounded_once(isa: str, n: int) -> None:
    x, y = row(n), row(n)
    np.testing.assert_array_equal(kernels.add(isa, x, y), x + y)
    np.testing.assert_array_equal(kernels.scale(isa, x, 1.7), x * np.float32(1.7))
    # A product of two float32 is exact in float64, and so is this sum but for rare ties.
    fused = (y.astype(np.float64) * np.float64(np.float32(0.3)) + x).astype(np.float32)
    assert ulps(kernels.add_scaled(isa, x, y, 0.3), fused.astype(np.float64)).max() <= 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_the_activation_times_up(isa: str, n: int, activation: str) -> None:
    gate, up = row(n, 3), row(n)
    want = ACTIVATIONS[activation](gate.astype(np.float64)) * up
    # 1 + erf cancels below zero: the error is relative to gate * up, not to the small result.
    np.testing.assert_array_less(np.abs(kernels.gated(isa, gate, up, activation) - want), 4e-7 * np.abs(gate * up) + 1e-30)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_stay_finite_far_out(isa: str) -> None:
    gate = np.array([-3e38, -1e4, -100, -89, 89, 100, 1e4, 3e38], np.float32)
    for activation in ACTIVATIONS:
        got = kernels.gated(isa, gate, np.ones_like(gate), activation)
        np.testing.assert_array_equal(got[:4], 0 if activation != "silu" else np.maximum(got[:4], 0))
        np.testing.assert_array_equal(got[4:], gate[4:])


@pytest.mark.parametrize("isa", ISAS)
def test_tanh_is_within_two_units_in_the_last_place(isa: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.geomspace(1e-30, 1, 20_001)]).astype(np.float32)
    want = np.tanh(x.astype(np.float64))
    assert ulps(kernels.softcap(isa, x, 1.0), want).max() <= 2  # cap 1 is tanh itself
    edges = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(bits(kernels.softcap(isa, edges, 1.0)), bits(np.array([1, -1, np.nan, 0.0, -0.0], np.float32)))


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_bounds_a_row(isa: str) -> None:
    x = row(577, 100)
    got = kernels.softcap(isa, x, 30.0)
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=4e-7)
    assert np.abs(got).max() <= 30


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(1, 8, 4), (3, 64, 32), (2, 80, 40), (2, 96, 24), (1, 34, 17)])
def test_rope_rotates_the_first_elements_of_each_head_and_no_others(isa: str, heads: int, head_dim: int, half: int) -> None:
    x, angles = row(heads * head_dim).reshape(heads, head_dim), row(half)
    c, s = np.cos(angles), np.sin(angles)
    a, b = x[:, :half].astype(np.float64), x[:, half : 2 * half].astype(np.float64)
    got = kernels.rope(isa, x, c, s)
    np.testing.assert_allclose(got[:, :half], a * c - b * s, atol=1e-6)
    np.testing.assert_allclose(got[:, half : 2 * half], b * c + a * s, atol=1e-6)
    np.testing.assert_array_equal(got[:, 2 * half :], x[:, 2 * half :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_every_instruction_set_gives_the_same_bits(isa: str, n: int) -> None:
    x, y, w = row(n, 5), row(n), row(n)
    x[n // 2] = np.float32(1e-40)  # a subnormal, which all take as zero
    y[n // 3] = -120.0
    calls: list[Callable[[str], Floats]] = [
        lambda i: kernels.rms_norm(i, x, w, 1e-6),
        lambda i: kernels.add(i, x, y),
        lambda i: kernels.add_scaled(i, x, y, 0.3),
        lambda i: kernels.scale(i, x, 1e-38),
        lambda i: kernels.softcap(i, x, 3.0),
        *[lambda i, a=a: kernels.gated(i, x, y, a) for a in ACTIVATIONS],
        *[lambda i, a=a: kernels.gated(i, y, x, a) for a in ACTIVATIONS],
        lambda i: kernels.rope(i, np.stack([x, y]), w[: n // 2], y[: n // 2]),
    ]
    for call in calls:
        np.testing.assert_array_equal(bits(call(isa)), bits(call("portable")))


def test_shapes_that_disagree_are_refused() -> None:
    x, y = row(8), row(9)
    for call in (
        lambda: kernels.rms_norm("portable", x, y, 1e-5),
        lambda: kernels.add("portable", x, y),
        lambda: kernels.gated("portable", x, y, "silu"),
        lambda: kernels.gated("portable", x, x, "relu"),
        lambda: kernels.rope("portable", x.reshape(2, 4), row(3), row(3)),
        lambda: kernels.scale("portable", x[:0], 1.0),
        lambda: kernels.scale("sse9", x, 1.0),
    ):
        with pytest.raises(ValueError):
            call()
