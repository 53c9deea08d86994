"""Activations: right to the bit against NumPy on every instruction set that this machine has."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native
from unit.executor.native.matmul_reference import quantize, to_bf16

kernels = _native.kernels
isas = pytest.mark.parametrize("isa", _native.available_isas())


def check(isa: str, x: NDArray[np.float32]) -> None:
    want = quantize(x)
    q, d, s, s16, zero_int4, zero_int8, zero_int8_16 = kernels.quantize(isa, x)
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
    x = np.zeros(32, np.float32)
    x[:6] = 127, 0.5, 1.5, 2.5, -0.5, -1.5
    assert kernels.quantize(isa, x)[0][0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    check(isa, x)


@isas
def test_the_largest_and_the_smallest_numbers_stay_in_range(isa: str) -> None:
    for largest in (np.finfo(np.float32).max, 2.0**-118, np.nextafter(np.float32(2.0**-118), np.float32(0)), 2.0**-126, 2.0**-149, 0.0):
        x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(largest)
        check(isa, x)
        assert (np.abs(kernels.quantize(isa, x)[0].astype(int)).max() == 127) == (largest >= 2.0**-118)


@isas
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_a_group_that_is_not_finite_is_marked_and_no_other(isa: str, value: float, place: int) -> None:
    x = np.random.default_rng(3).standard_normal(96).astype(np.float32)
    x[32 + place] = value
    check(isa, x)
    assert np.isnan(kernels.quantize(isa, x)[1]).tolist() == [False, True, False]


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
