"""Matrix products: right to the bit against NumPy, and the same bits on every instruction set, however the work is cut."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native
from unit.executor.native.matmul_reference import BF16, FORMS, INT4, INT8, Form, Weights, matmul, name, quantize, random_weights

kernels = _native.kernels
ISAS = _native.available_isas()
SHAPES = [(1, 8), (15, 33), (17, 40), (33, 576)]

forms = pytest.mark.parametrize("form", FORMS, ids=name)
isas = pytest.mark.parametrize("isa", ISAS)


def rows_of(count: int, cols: int, seed: int = 1) -> NDArray[np.float32]:
    """With a few numbers so large that their groups are refined, others in every row, and none in some."""
    rng = np.random.default_rng(seed)
    large = (rng.random((count, cols)) < 1 / 64) & (np.arange(count)[:, None] % 3 != 2)
    return (rng.standard_normal((count, cols)) * np.where(large, 50, 1)).astype(np.float32)


def product(isa: str, w: Weights, x: NDArray[np.float32], **cut: int) -> NDArray[np.float32]:
    """[M, padded_rows]"""
    y: NDArray[np.float32] = kernels.matmul(isa, w.form, *w.shape, w.data(), x, **cut)
    return y


def sums_in_its_own_order(isa: str, form: Form) -> bool:
    return form[0] == BF16 and not _native.has_portable_bf16(isa)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@isas
@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_contract_to_the_bit(isa: str, form: Form, shape: tuple[int, int]) -> None:
    w, x = random_weights(form, *shape, seed=2), rows_of(3, shape[1])
    y = product(isa, w, x)
    if sums_in_its_own_order(isa, form):
        np.testing.assert_allclose(y[:, : shape[0]], matmul(w, x), atol=1e-5)
    else:
        same_bits(y[:, : shape[0]], matmul(w, x))
    assert not y[:, shape[0] :].any()


@isas
@forms
def test_a_row_has_the_same_bits_among_any_number_of_rows(isa: str, form: Form) -> None:
    w, x = random_weights(form, 40, 416, seed=3), rows_of(70, 416)
    assert len({quantize(row).refined for row in x}) > 20
    want = product(isa, w, x, rows_at_once=1)
    if not sums_in_its_own_order(isa, form):
        same_bits(want, product("portable", w, x))
    for count in (*range(1, 35), 48, 53, 64, 70):
        same_bits(product(isa, w, x[:count]), want[:count])
        same_bits(product(isa, w, x, rows_at_once=count), want)


@isas
@forms
def test_any_cut_by_blocks_gives_the_same_bits(isa: str, form: Form) -> None:
    w = random_weights(form, 16 * 9 - 5, 160, seed=4)
    for count in (1, 3, 20, 40):
        x = rows_of(count, 160)
        whole = product(isa, w, x)
        for blocks in (1, 2, 3, 4, 5, 8):
            same_bits(product(isa, w, x, blocks_at_once=blocks), whole)


@isas
@forms
@pytest.mark.parametrize("cols", [32, 64, 96, 128, 160, 288, 1056])
def test_any_number_of_groups_is_right(isa: str, form: Form, cols: int) -> None:
    w = random_weights(form, 40, cols, seed=5)
    for count in (2, 19, 37):
        x = rows_of(count, cols)
        if sums_in_its_own_order(isa, form):
            np.testing.assert_allclose(product(isa, w, x), product("portable", w, x), atol=1e-4)
        else:
            same_bits(product(isa, w, x), product("portable", w, x))


@isas
def test_a_block_larger_than_the_cache_share_is_right(isa: str) -> None:
    w, x = random_weights((INT8, False, True, 16), 50, 14336, seed=6), rows_of(37, 14336)
    same_bits(product(isa, w, x), product("portable", w, x))


@isas
@pytest.mark.parametrize("form", [form for form in FORMS if form[0] != BF16], ids=name)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_times_the_largest_activations_do_not_saturate(isa: str, form: Form, sign: int) -> None:
    parts = random_weights(form, 16, 64, seed=7)
    for code in (0, 15 if form[0] == INT4 else 255):
        w = Weights(form, np.full_like(parts.codes, code), parts.d, parts.m)
        for rows in (1, 18):
            x = np.full((rows, 64), sign * 3.5, np.float32)
            assert (np.abs(quantize(x[0]).q) == 127).all()
            same_bits(product(isa, w, x), matmul(w, x))


@isas
@forms
def test_zeros_give_positive_zeros(isa: str, form: Form) -> None:
    w = random_weights(form, 17, 64, seed=8)
    for rows in (1, 20):
        same_bits(product(isa, w, np.zeros((rows, 64), np.float32)), np.zeros((rows, 32), np.float32))


@isas
@pytest.mark.parametrize("form", [form for form in FORMS if form[0] != BF16 and not form[2]], ids=name)
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-15, 65504.0])
def test_float16_scales_count_in_full_subnormal_or_large(isa: str, form: Form, scale: float) -> None:
    parts = random_weights(form, 16, 96, seed=9)
    w = Weights(form, parts.codes, np.full_like(parts.d, scale), np.full_like(parts.m, -scale))
    for count in (1, 17):
        x = rows_of(count, 96)
        want = matmul(w, x)
        assert want.any()
        assert np.isfinite(want).all()
        same_bits(product(isa, w, x), want)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if not sums_in_its_own_order(isa, (BF16, False, False, 32))])
def test_bfloat16_products_near_the_smallest_numbers_count_alike(isa: str) -> None:
    rng = np.random.default_rng(14)
    codes = (rng.integers(0, 2, (32, 64)) << 15 | rng.integers(0, 0x2000, (32, 64))).astype(np.uint16)  # up to 2^-63, subnormals included
    w = Weights((BF16, False, False, 32), codes, np.zeros((32, 0)), np.zeros((32, 0)))
    x = rows_of(5, 64) * np.float32([[2.0**-126], [2.0**-100], [2.0**-63], [1.0], [2.0**20]])
    want = product("portable", w, x)
    assert (want == 0).any()
    assert ((want != 0) & (np.abs(want) < 2.0**-120)).any()
    same_bits(product(isa, w, x), want)


@isas
@forms
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad_row", [0, 7, 20])
def test_a_row_that_is_not_finite_disturbs_no_other(isa: str, form: Form, value: float, bad_row: int) -> None:
    w, x = random_weights(form, 33, 96, seed=10), rows_of(21, 96)
    clean = product(isa, w, x)
    x[bad_row, 40] = value
    y = product(isa, w, x)
    others = np.arange(21) != bad_row
    same_bits(y[others], clean[others])
    assert not np.isfinite(y[bad_row, :33]).any()


@isas
@forms
def test_a_product_is_near_that_of_real_numbers(isa: str, form: Form) -> None:
    w, x = random_weights(form, 64, 576, seed=11), rows_of(17, 576)
    exact = x.astype(np.float64) @ w.dequantized().T.astype(np.float64)
    error = product(isa, w, x) - exact
    assert np.sqrt((error**2).mean()) < 0.01 * np.sqrt((exact**2).mean())


@isas
@forms
def test_a_row_of_a_matrix_reads_back_to_the_bit(isa: str, form: Form) -> None:
    w = random_weights(form, 33, 72, seed=12)
    for row in (0, 15, 16, 32):
        out = kernels.dequantize_row(isa, form, 33, 72, w.data(), row)
        same_bits(out[:72], w.dequantized()[row])
        assert out.shape == (96,)
        assert not out[72:].any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    form = (INT4, True, False, 32)
    w = random_weights(form, 17, 40, seed=13)
    data, x = w.data(), rows_of(2, 40)
    wrong: list[tuple[Any, str]] = [
        (("none", form, 17, 40, data, x), "no kernels for 'none'"),
        (("portable", (3, True, False, 32), 17, 40, data, x), "quant"),
        (("portable", (INT4, True, False, 16), 17, 40, data, x), "scale_group"),
        (("portable", (BF16, True, False, 32), 17, 40, data, x), "bf16"),
        (("portable", form, 0, 40, data, x), "rows and cols"),
        (("portable", form, 17, 40, data[:-64], x), "bytes"),
        (("portable", form, 17, 40, data, rows_of(2, 39)), "columns"),
        (("portable", form, 17, 40, data, x[:0]), "rows"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            kernels.matmul(*arguments)
    with pytest.raises(ValueError, match="no such row"):
        kernels.dequantize_row("portable", form, 17, 40, data, 17)
