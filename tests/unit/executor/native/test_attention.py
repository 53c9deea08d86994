"""Attention: right against float64, the same bits on every instruction set but `amx`, and untouched by whatever a query does not see."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sterna.executor.native import _native
from unit.executor.native.lanes_reference import Floats, bfloat16, bits, kernels, widened

ISAS = _native.available_isas()
ALIKE = [isa for isa in ISAS if _native.has_portable_bf16(isa)]
"""Tiles of bfloat16 are summed in an order of their own."""
rng = np.random.default_rng(5)
NO_WINDOW = 0x7FFFFFFF
HEAD_DIMS = [8, 40, 64, 80, 96, 128, 256]
Partial = tuple[Floats, Floats, Floats]


def padded(head_dim: int) -> int:
    return (head_dim + 15) // 16 * 16


@dataclass(frozen=True)
class Case:
    """One key head: k, v [keys, head_dim] from position 0 on, q [queries, head_dim] at `positions`."""

    k: Floats
    v: Floats
    q: Floats
    positions: NDArray[np.int32]
    window: int = NO_WINDOW
    softcap: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.k.shape[1]

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


def make(head_dim: int, keys: int, positions: list[int], window: int = NO_WINDOW, softcap: float = 0.0) -> Case:
    k, v = rng.standard_normal((2, keys, head_dim)).astype(np.float32)
    q = (rng.standard_normal((len(positions), head_dim)) * 2).astype(np.float32)
    return Case(k, v, q, np.array(positions, np.int32), window, softcap)


def pages_of(case: Case, first: int, count: int, isa: str, poison: bool = True) -> NDArray[np.uint8]:
    """Pages with keys first .. first + count - 1; every other byte is part of a NaN."""
    size = padded(case.head_dim) * 64
    pages = np.full((-(-count // 16), size), 0xFF if poison else 0, np.uint8)
    for i in range(count):
        kernels.store_kv(isa, case.k[first + i], case.v[first + i], i % 16, pages[i // 16])
    return pages


def attend(case: Case, isa: str, first: int = 0, keys: int | None = None, pages: NDArray[np.uint8] | None = None) -> Partial:
    count = min(len(case.k) - first, 256) if keys is None else keys
    pages = pages_of(case, first, count, isa) if pages is None else pages
    q = kernels.to_query(isa, case.q)
    m, total, o = kernels.attend(
        isa, q, case.positions, pages, first, count, case.head_dim, window=case.window, scale=case.scale, softcap=case.softcap
    )
    return m, total, o


def whole(case: Case, isa: str) -> Floats:
    """All spans folded and finished."""
    n = len(case.q)
    m, total, o = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.zeros((n, padded(case.head_dim)), np.float32)
    for first in range(0, len(case.k), 256):
        kernels.fold(isa, m, total, o, *attend(case, isa, first), case.head_dim)
    return kernels.finish(isa, m, total, o, case.head_dim)


def reference(case: Case) -> NDArray[np.float64]:
    """Softmax attention in float64 on the rounded q, k and v."""
    k, v, q = (widened(bfloat16(x)).astype(np.float64) for x in (case.k, case.v, case.q))
    scores = q @ k.T * case.scale
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    at, key = case.positions[:, None].astype(np.int64), np.arange(len(k))[None]
    scores[(key > at) | (key <= at - case.window)] = -np.inf
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True)


def same(a: Partial, b: Partial) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_is_softmax_attention(isa: str, head_dim: int) -> None:
    for softcap, window in [(0.0, NO_WINDOW), (5.0, NO_WINDOW), (0.0, 100), (5.0, 1)]:
        case = make(head_dim, 300, [299, 298, 256, 255, 140, 15, 0], window, softcap)
        # p is rounded to bfloat16 (one part in 512) and l sums what was rounded.
        np.testing.assert_allclose(whole(case, isa), reference(case), atol=6e-3)


@pytest.mark.parametrize("isa", ISAS)
def test_the_span_s_sums_are_those_of_the_contract(isa: str) -> None:
    case = make(64, 256, [255, 100])
    m, total, o = attend(case, isa)
    k, v, q = (widened(bfloat16(x)).astype(np.float64) for x in (case.k, case.v, case.q))
    scores = q @ k.T * case.scale
    scores[1, 101:] = -np.inf
    np.testing.assert_allclose(m, scores.max(axis=1), rtol=1e-5)
    p = widened(bfloat16(np.exp(scores - m[:, None]).astype(np.float32))).astype(np.float64)
    # A score's last bits can tip the rounding of a weight: by one part in 256 of it, here and there.
    np.testing.assert_allclose(total, p.sum(axis=1), rtol=1e-3)
    np.testing.assert_allclose(o[:, :64], p @ v, atol=2e-2)


@pytest.mark.parametrize("isa", ALIKE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_instruction_set_gives_the_same_bits(isa: str, head_dim: int) -> None:
    for count, keys, window, softcap in [(1, 1, NO_WINDOW, 0.0), (3, 255, NO_WINDOW, 0.0), (9, 77, 20, 0.0), (25, 256, NO_WINDOW, 3.0)]:
        case = make(head_dim, keys, [max(0, keys - 1 - 7 * i) for i in range(count)], window, softcap)
        np.testing.assert_array_equal(kernels.to_query(isa, case.q), kernels.to_query("portable", case.q))
        pages = pages_of(case, 0, keys, isa)
        np.testing.assert_array_equal(pages, pages_of(case, 0, keys, "portable"))
        same(attend(case, isa, pages=pages), attend(case, "portable", pages=pages))
    case = make(head_dim, 260, [259, 256, 3])
    np.testing.assert_array_equal(bits(whole(case, isa)), bits(whole(case, "portable")))


@pytest.mark.parametrize("isa", ALIKE)
def test_products_too_small_for_float32_vanish_alike(isa: str) -> None:
    tiny = replace(make(64, 100, [99, 50]), window=60)
    tiny.q[:] *= np.float32(2.0**-62)
    tiny.k[:] *= np.exp2(rng.integers(-70, -60, tiny.k.shape)).astype(np.float32)
    tiny.v[:] *= np.exp2(rng.integers(-126, -110, tiny.v.shape)).astype(np.float32)
    products = np.abs(tiny.q[0].astype(np.float64) * tiny.k)
    assert (products < 2.0**-126).any()
    assert (products > 2.0**-126).any()
    m, total, o = attend(tiny, isa)
    assert np.abs(o).max() < 2.0**-100
    same((m, total, o), attend(tiny, "portable"))


@pytest.mark.parametrize("isa", ISAS)
def test_a_sum_that_underflows_is_the_same_zero_alone_and_beside_one_that_sees_more(isa: str) -> None:
    """It is -0 until weights of zero are added, as many as the others' keys ask for."""
    case = make(64, 200, [16, 199])
    case.k[16] = case.k[15]
    case.q[0] = case.k[15] * 400  # the other keys weigh nothing
    case.v[:] = 1
    case.v[15], case.v[16] = -1.5 * 2.0**-126, 2.0**-126
    alone = replace(case, q=case.q[:1], positions=case.positions[:1])
    m, total, o = attend(alone, isa)
    assert (total[0], o[0].any()) == (2, False)
    same((m, total, o), tuple(x[:1] for x in attend(case, isa)))


@pytest.mark.parametrize("isa", ISAS)
def test_a_query_s_result_does_not_depend_on_the_queries_beside_it(isa: str) -> None:
    for head_dim in (40, 64, 96):
        case = make(head_dim, 256, [int(p) for p in rng.integers(0, 256, 50)], 90)
        m, total, o = attend(case, isa)
        pages = pages_of(case, 0, 256, isa)
        for first, count in [(0, 1), (49, 1), (7, 2), (1, 3), (0, 5), (3, 6), (10, 7), (0, 23), (20, 24), (5, 25), (1, 48)]:
            part = slice(first, first + count)
            few = replace(case, q=case.q[part], positions=case.positions[part])
            same(attend(few, isa, pages=pages), (m[part], total[part], o[part]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_keys_above_a_query_change_no_bit(isa: str, head_dim: int) -> None:
    for position in (0, 1, 15, 16, 17, 100, 254):
        case = make(head_dim, 256, [position, position, max(0, position - 3)])
        cut = attend(case, isa, keys=position + 1)
        for keys in {position + 2, min(position + 18, 256), 256}:
            same(attend(case, isa, keys=keys), cut)
        above = replace(case, q=np.vstack([case.q, case.q[:1]]), positions=np.append(case.positions, np.int32(255)))
        same(tuple(x[:3] for x in attend(above, isa)), cut)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_keys", [1, 2, 15, 16, 17, 31, 129, 255])
def test_slots_behind_num_keys_have_no_influence(isa: str, num_keys: int) -> None:
    case = make(64, num_keys, [num_keys - 1, 300, 0])
    poisoned, clean = (attend(case, isa, pages=pages_of(case, 0, num_keys, isa, poison)) for poison in (True, False))
    assert np.isfinite(poisoned[2]).all()
    same(poisoned, clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_slots_below_every_window_have_no_influence(isa: str, window: int) -> None:
    case = make(64, 200, [199, 198, 190], window)
    pages = pages_of(case, 0, 200, isa)
    want = attend(case, isa, pages=pages)
    assert np.isfinite(want[2]).all()
    gone = 190 - window + 1
    poisoned = pages_of(replace(case, k=np.where(np.arange(200)[:, None] < gone, np.float32(np.nan), case.k)), 0, 200, isa)
    values = poisoned[:, 2048:].view(np.uint16).reshape(-1, 8, 64, 2)
    for i in range(gone):
        values[i // 16, i % 16 // 2, :, i % 2] = 0x7FC0
    same(attend(case, isa, pages=poisoned), want)


@pytest.mark.parametrize("isa", ISAS)
def test_a_query_that_sees_no_key_comes_to_nothing_and_changes_nothing(isa: str) -> None:
    case = replace(make(40, 512, [100, 511, 300]), window=120)
    m, total, o = attend(case, isa, first=256)
    assert (m[0], total[0], o[0].any()) == (-np.inf, 0, False)
    assert np.isfinite(m[1:]).all()
    into = attend(case, isa)
    before = tuple(x.copy() for x in into)
    kernels.fold(isa, *into, m, total, o, 40)
    same(tuple(x[:1] for x in into), tuple(x[:1] for x in before))
    np.testing.assert_allclose(whole(case, isa), reference(case), atol=6e-3)
    nobody = replace(case, positions=np.array([3, 4, 5], np.int32))
    m, total, o = attend(nobody, isa, first=256)
    assert (m == -np.inf).all()
    assert not total.any()
    assert not o.any()


@pytest.mark.parametrize("isa", ISAS)
def test_nan_in_a_key_that_is_seen_reaches_the_result(isa: str) -> None:
    for at in (0, 100):
        case = make(64, 101, [100, 50])
        case.k[at, 3] = np.nan
        got = whole(case, isa)
        assert np.isnan(got[0]).all()
        assert np.isnan(got[1]).all() == (at <= 50)
    case = make(64, 1, [0])
    case.k[0, 0] = np.nan
    assert np.isnan(whole(case, isa)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_value_that_is_not_finite_reaches_those_who_see_it_and_nobody_else(isa: str, bad: float) -> None:
    """3.4e38 is a float32, and too large for a bfloat16."""
    case = make(40, 101, [100, 50])
    clean = whole(case, isa)
    case.v[100, 7] = bad
    got = whole(case, isa)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(bits(got[1]), bits(clean[1]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 50])
def test_fold_and_finish_are_their_formulas(isa: str, count: int) -> None:
    def partial() -> Partial:
        return (
            rng.standard_normal(count).astype(np.float32),
            rng.random(count, np.float32) + 1,
            rng.standard_normal((count, 48)).astype(np.float32),
        )

    into, following = partial(), partial()
    following[0][::5], following[1][::5] = -np.inf, 0
    m, total, o, m2, l2, o2 = (x.astype(np.float64) for x in (*into, *following))
    top = np.maximum(m, m2)
    a, b = np.exp(m - top), np.exp(m2 - top)
    want_l, want_o = total * a + l2 * b, o * a[:, None] + o2 * b[:, None]
    on_portable = tuple(x.copy() for x in into)
    kernels.fold(isa, *into, *following, 40)
    np.testing.assert_array_equal(into[0], top.astype(np.float32))
    np.testing.assert_allclose(into[1], want_l, rtol=1e-6)
    np.testing.assert_allclose(into[2], want_o, atol=1e-6)
    np.testing.assert_allclose(kernels.finish(isa, *into, 40), (want_o / want_l[:, None])[:, :40], atol=1e-6)
    kernels.fold("portable", *on_portable, *following, 40)
    same(into, on_portable)
    np.testing.assert_array_equal(bits(kernels.finish(isa, *into, 40)), bits(kernels.finish("portable", *into, 40)))


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_rounded_to_even_and_keeps_nan(isa: str) -> None:
    u = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    u[:8] = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000, 0x00000001, 0x80400000]
    x = u.view(np.float32)
    got = kernels.to_query(isa, x.reshape(-1, 16)).ravel()
    nan, tiny = np.isnan(x), (u & 0x7F800000) == 0
    np.testing.assert_array_equal(got[~nan & ~tiny], bfloat16(x[~nan & ~tiny]))
    assert np.isnan(widened(got[nan])).all()
    np.testing.assert_array_equal(got[tiny], (u[tiny] >> 16) & 0x8000)


def test_shapes_that_disagree_are_refused() -> None:
    case = make(64, 20, [19])
    q, pages = kernels.to_query("portable", case.q), pages_of(case, 0, 20, "portable")
    for change in (
        {"q": q[:, :48].copy()},
        {"positions": np.zeros(2, np.int32)},
        {"pages": pages[:1]},
        {"pages": pages[:, :64].copy()},
        {"first_key": 16},
        {"first_key": -256},
        {"num_keys": 0},
        {"num_keys": 257},
        {"head_dim": 0},
        {"window": 0},
        {"softcap": -1.0},
    ):
        arguments = {"q": q, "positions": case.positions, "pages": pages, "first_key": 0, "num_keys": 20, "head_dim": 64}
        with pytest.raises(ValueError):
            kernels.attend("portable", **(arguments | change))
    with pytest.raises(ValueError):
        kernels.store_kv("portable", case.k[0], case.v[0], 16, pages[0])
    with pytest.raises(ValueError):
        kernels.store_kv("portable", case.k[0], case.v[0], 0, pages[0][:100].copy())
