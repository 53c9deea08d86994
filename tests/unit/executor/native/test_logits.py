"""Logits: the maximum and its index, and the sum of exponentials."""

import numpy as np
import pytest

from unit.executor.native.lanes_reference import ISAS, SIZES, kernels, ulps

rng = np.random.default_rng(4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [*SIZES, 1023, 1024, 1025, 49_152])
def test_the_maximum_is_found_wherever_it_stands(isa: str, n: int) -> None:
    x = -rng.random(n, dtype=np.float32) - 1
    for at in {0, n // 3, n // 2, n - 1}:
        y = x.copy()
        y[at] = -0.5
        assert kernels.maximum(isa, y) == (-0.5, at, False)


@pytest.mark.parametrize("isa", ISAS)
def test_the_lowest_index_wins_a_tie(isa: str) -> None:
    for i in range(40):
        for j in range(i + 1, 40):
            x = np.zeros(40, np.float32)
            x[i] = x[j] = 1
            assert kernels.maximum(isa, x) == (1.0, i, False)
    assert kernels.maximum(isa, np.full(33, -np.inf, np.float32)) == (-np.inf, 0, False)
    assert kernels.maximum(isa, np.array([-np.inf, -1, 0.0, -0.0, 0.0], np.float32))[1] == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", SIZES)
def test_nan_anywhere_is_flagged_and_does_not_hide_the_maximum(isa: str, n: int) -> None:
    for at in {0, n // 2, n - 1}:
        x = rng.standard_normal(n).astype(np.float32)
        x[at] = np.nan
        value, index, has_nan = kernels.maximum(isa, x)
        assert has_nan
        if n == 1:
            assert (value, index) == (-np.inf, 0)
        else:
            assert (value, index) == (np.nanmax(x), np.nanargmax(x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [*SIZES, 1023, 1024, 1025, 49_152])
def test_exp_sum_is_the_sum(isa: str, n: int) -> None:
    x = (rng.standard_normal(n) * 4).astype(np.float32)
    x[n // 2 :: 7] = -np.inf
    x[0] = top = np.float32(12)
    want = np.exp(x.astype(np.float64) - top).sum()
    got = kernels.exp_sum(isa, x, top)
    assert got == pytest.approx(want, rel=1e-6)
    assert got == kernels.exp_sum("portable", x, top)


@pytest.mark.parametrize("isa", ISAS)
def test_exp_is_within_one_unit_in_the_last_place(isa: str) -> None:
    x = np.concatenate([np.linspace(-87.33, 88.722, 20_001), np.linspace(-1, 1, 10_001)]).astype(np.float32)
    got = np.array([kernels.exp_sum(isa, x[i : i + 1], 0.0) for i in range(len(x))], np.float32)
    assert ulps(got, np.exp(x.astype(np.float64))).max() <= 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("x", "y"), [(-np.inf, 0.0), (-88.0, 0.0), (-1e30, 0.0), (0.0, 1.0), (89.0, np.inf), (np.inf, np.inf), (np.nan, np.nan)]
)
def test_exp_ends_where_float32_does(isa: str, x: float, y: float) -> None:
    np.testing.assert_equal(kernels.exp_sum(isa, np.array([x], np.float32), 0.0), y)
