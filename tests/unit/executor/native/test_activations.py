"""Activations: right to the bit against NumPy on every instruction set that this machine has."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native
from unit.executor.native.matmul_reference import Quantized, quantize, to_bf16

kernels = _native.kernels
isas = pytest.mark.parametrize("isa", _native.available_isas())


def check(isa: str, x: NDArray[np.float32]) -> tuple[int, ...]:
    """The groups that are refined."""
    want = quantize(x)
    parts = kernels.quantize(isa, x)
    check_groups([part[: len(want.q)] for part in parts[1:]], want)
    assert want.refinement is not None
    assert tuple(parts[0].tolist()) == want.refined
    check_groups([part[len(want.q) :] for part in parts[1:]], want.refinement)
    return want.refined


def check_groups(parts: list[NDArray[Any]], want: Quantized) -> None:
    q, d, s, s16, zero_int4, zero_int8, zero_int8_16 = parts
    np.testing.assert_array_equal(q, want.q)
    np.testing.assert_array_equal(d, want.d)
    whole, halves = want.sums(32)[:, 0], want.sums(16)
    with np.errstate(over="ignore"):
        s_want, s16_want = want.d * whole.astype(np.float32), want.d[:, None] * halves.astype(np.float32)
    np.testing.assert_array_equal(s, s_want)
    np.testing.assert_array_equal(s16, s16_want)
    np.testing.assert_array_equal(zero_int4, -8 * whole)
    np.testing.assert_array_equal(zero_int8, -128 * whole)
    np.testing.assert_array_equal(zero_int8_16, -128 * halves)


@isas
@pytest.mark.parametrize("cols", [1, 8, 15, 16, 17, 31, 32, 33, 63, 576])
def test_a_row_is_quantized_to_the_bit(isa: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    for spread in (1e-30, 1e-3, 1.0, 1e30):
        check(isa, (rng.standard_normal(cols) * spread).astype(np.float32))


@isas
def test_halves_round_to_even(isa: str) -> None:
    x = np.zeros((3, 32), np.float32)
    x[:, :6] = 127, 0.5, 1.5, 2.5, -0.5, -1.5
    for groups in (1, 2, 3):
        assert kernels.quantize(isa, x[:groups].ravel())[1][:groups, :6].tolist() == [[127, 0, 2, 2, 0, -2]] * groups
        check(isa, x[:groups].ravel())


@isas
def test_a_sum_of_negative_zeros_is_zero(isa: str) -> None:
    """In each group's first half every quotient rounds to -0."""
    x = np.full((3, 32), -0.1, np.float32)
    x[:, 16] = -127
    _, _, _, s, s16, *_ = kernels.quantize(isa, x.ravel())
    assert s16[:3, 0].view(np.uint32).tolist() == [0, 0, 0]
    assert np.signbit(s[:3]).all()


@isas
def test_the_largest_and_the_smallest_numbers_stay_in_range(isa: str) -> None:
    for largest in (np.finfo(np.float32).max, 2.0**-118, np.nextafter(np.float32(2.0**-118), np.float32(0)), 2.0**-126, 2.0**-149, 0.0):
        x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(largest)
        check(isa, x)
        assert (np.abs(kernels.quantize(isa, x)[1].astype(int)).max() == 127) == (largest >= 2.0**-118)
        ordinary = np.linspace(-3, 2, 32, dtype=np.float32)
        for beside in ((x, ordinary), (ordinary, x), (x, x)):
            check(isa, np.concatenate(beside))


@isas
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_a_group_that_is_not_finite_is_marked_and_no_other(isa: str, value: float, place: int) -> None:
    for group in range(3):
        x = np.random.default_rng(3).standard_normal(96).astype(np.float32)
        x[32 * group + place] = value
        check(isa, x)
        assert np.isnan(kernels.quantize(isa, x)[2]).tolist() == [i == group for i in range(3)]


@isas
def test_groups_that_are_far_larger_than_the_others_are_refined(isa: str) -> None:
    rng = np.random.default_rng(5)
    for cols in (129, 160, 288, 576, 1536):
        groups = -(-cols // 32)
        x = rng.standard_normal(cols).astype(np.float32)
        assert check(isa, x) == ()
        large = sorted(rng.choice(groups, max(groups // 6, 1), replace=False).tolist())
        for each in large:
            x[each * 32] = 100 * rng.choice([-1, 1]) * (1 + 0.1 * rng.random())
        assert check(isa, x) == tuple(large)
        for spread in (1e-34, 1e-18, 1e18, 1e34):  # squares that leave float32's numbers
            check(isa, x * np.float32(spread))


@isas
def test_at_most_a_quarter_of_the_groups_can_be_refined(isa: str) -> None:
    x = np.zeros(32 * 16, np.float32)
    for count in range(1, 6):
        x[: 32 * count : 32] = 1.0
        assert check(isa, x) == (tuple(range(count)) if count < 4 else ())


@isas
def test_a_refined_group_has_its_numbers_to_sixteen_bits(isa: str) -> None:
    x = np.random.default_rng(6).standard_normal(576).astype(np.float32)
    x[64:96] *= 50
    refined, q, d, *_ = kernels.quantize(isa, x)
    assert refined.tolist() == [2]
    known = [d[i].astype(np.float64) * q[i] for i in (2, 18)]
    largest = np.abs(x[64:96]).max()
    assert np.abs(known[0] - x[64:96]).max() > largest / 2**9
    assert np.abs(known[0] + known[1] - x[64:96]).max() < largest / 2**15


@isas
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_not_refined(isa: str, value: float) -> None:
    x = np.random.default_rng(7).standard_normal(576).astype(np.float32)
    x[0], x[100] = 1000, value
    assert check(isa, x) == ()


@isas
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 32, 33, 100])
def test_bfloat16_is_rounded_to_nearest_even_and_padded_with_zeros(isa: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    x = rng.integers(0, 1 << 32, cols, dtype=np.uint32).view(np.float32)
    x[~np.isfinite(x)] = 1.0
    x[: min(cols, 4)] = np.array([0x3F808000, 0x3F818000, 0x80000001, 0x7F7FFFFF], np.uint32).view(np.float32)[: min(cols, 4)]
    out = kernels.to_bf16(isa, x)
    np.testing.assert_array_equal(out[:cols], to_bf16(x))
    assert len(out) == -(-cols // 32) * 32
    assert not out[cols:].any()


def test_a_row_of_nothing_is_refused() -> None:
    for each in (kernels.quantize, kernels.to_bf16):
        with pytest.raises(ValueError, match="elements"):
            each("portable", np.zeros(0, np.float32))
