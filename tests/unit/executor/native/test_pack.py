"""The packer in C++: what it keeps, what it rounds, what it refuses. Packed bytes are read by `unpack.py`, sources by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.formats import BF16, INT4, INT8, SOURCE_TYPES, Format
from unit.executor.native.unpack import unpack

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

DOCS = Path(__file__).parents[4] / "docs" / "weights.md"
BLOCK_TYPES = [name for name, source in SOURCE_TYPES.items() if not source.is_floats]
AS_BF16, AS_INT8, AS_INT4 = Format(BF16, False, False, 32), Format(INT8, False, False, 32), Format(INT4, True, False, 32)
FLOAT_FORMATS = (AS_BF16, AS_INT8, AS_INT4)

SCALE_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where float16 numbers lie in a type's block."""


def random_blocks(kind: str, rows: int, blocks: int, *, seed: int = 0) -> Bytes:
    """(rows, bytes): any codes, any finite scales: negative, subnormal and largest ones too."""
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, (rows, blocks, SOURCE_TYPES[kind].block_bytes), np.uint8)
    for offset in SCALE_OFFSETS[kind]:
        scales = rng.integers(0, 0x7C00, (rows, blocks, 1), np.uint16) | rng.integers(0, 2, (rows, blocks, 1), np.uint16) << np.uint16(15)
        content[:, :, offset : offset + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        content[:, :, 0] %= 253
    return content.reshape(rows, -1)


def pack(kind: str, form: Format, cols: int, rows: Bytes, threads: int = 1) -> Bytes:
    out = np.full(_native.matrix_bytes(form, len(rows), cols), 0xA5, np.uint8)
    assert _native.pack_rows(kind, form, cols, rows, out, threads) is None
    return out


def pack_floats(values: Float32, form: Format, kind: str = "F32") -> Float32:
    """Pack and read back."""
    stored = np.ascontiguousarray(values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind])).view(np.uint8)
    return unpack(form, *values.shape, pack(kind, form, values.shape[1], stored))


def gaussian(rows: int, cols: int, *, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, cols), np.float32)


def test_every_block_type_is_tried() -> None:
    assert set(BLOCK_TYPES) == set(SCALE_OFFSETS)


@pytest.mark.parametrize("kind", SOURCE_TYPES)
def test_a_types_block_has_ggmls_size(kind: str) -> None:
    source = SOURCE_TYPES[kind]
    assert (source.block_cols, source.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def test_the_table_for_users_says_what_is_done() -> None:
    rows = [
        line.split("|")[1:-1] for line in DOCS.read_text().split("## What becomes")[1].split("## ")[0].splitlines() if line.startswith("| ")
    ]
    table = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row] for row in rows[1:])}
    assert set(table) == set(SOURCE_TYPES)
    for kind, (packed, scale, minimum, exact, stored, used) in table.items():
        source = SOURCE_TYPES[kind]
        form = source.format
        precision = "float32" if form.float32_scales else "float16"
        assert packed == {INT4: "int4", INT8: "int8", BF16: "bfloat16"}[form.quant]
        assert scale == ("" if form.quant == BF16 else f"{precision} per {form.scale_group}")
        assert minimum == (precision if form.has_min else "")
        assert (exact == "yes") == (not source.is_floats or kind == "BF16")
        assert float(stored) == pytest.approx(source.block_bytes / source.block_cols, abs=1e-4)
        assert float(used) == pytest.approx(_native.matrix_bytes(form, 1024, 1024) / 1024**2, abs=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_quantized_type_keeps_its_numbers_to_the_bit(kind: str, rows: int) -> None:
    source = SOURCE_TYPES[kind]
    stored = random_blocks(kind, rows, 3)
    cols = 3 * source.block_cols
    expected = dequantize(stored, GGMLQuantizationType[kind]).astype(np.float32)
    packed = unpack(source.format, rows, cols, pack(kind, source.format, cols, stored))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(packed.view(np.uint32), expected.view(np.uint32))


def test_every_finite_float16_scale_is_kept() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = patterns[(patterns & 0x7C00) != 0x7C00]
    blocks = np.ones((len(patterns), 34), np.uint8)
    blocks[:, :2] = patterns[:, None].view(np.uint8)
    packed = unpack(AS_INT8, len(patterns), 32, pack("Q8_0", AS_INT8, 32, blocks))
    np.testing.assert_array_equal(packed[:, 0].view(np.uint32), patterns.view(np.float16).astype(np.float32).view(np.uint32))


def test_bfloat16_weights_are_kept() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = np.resize(patterns[(patterns & 0x7F80) != 0x7F80], (200, 320))
    packed = unpack(AS_BF16, 200, 320, pack("BF16", AS_BF16, 320, patterns.view(np.uint8)))
    np.testing.assert_array_equal(packed.view(np.uint32) >> 16, patterns)
    assert not (packed.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "F64"])
def test_floats_become_the_nearest_bfloat16(kind: str) -> None:
    values = gaussian(33, 100)
    if kind == "F16":
        values[0] = np.arange(1, 101, dtype=np.uint16).view(np.float16).astype(np.float32)  # subnormal in float16
    stored = values.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[kind]).astype(np.float32)
    expected = torch.from_numpy(stored).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(pack_floats(values, AS_BF16, kind), expected)


def test_int8_is_off_by_half_a_scale_at_most_and_its_scale_is_the_largest_weight_over_127() -> None:
    values = gaussian(40, 96) * np.float32(10.0) ** np.arange(-6, 4).repeat(4)[:, None].astype(np.float32)
    groups = values.reshape(40, 3, 32)
    scales = (np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    error = np.abs(pack_floats(values, AS_INT8).reshape(groups.shape) - groups)
    # A scale rounded to float16 shifts the outermost code by up to 127 * 2**-11 of a scale; below 2**-14 float16 is coarser still.
    normal = scales[..., 0] >= 2.0**-14
    assert normal.any()
    assert not normal.all()
    assert (error <= scales * np.float32(0.5 + 127 / 2048))[normal].all()
    codes = pack_floats(values, AS_INT8).reshape(groups.shape)[normal] / scales[normal]
    np.testing.assert_array_equal(codes, np.rint(codes))


def test_int4_loses_less_than_the_plain_grid_from_least_to_greatest() -> None:
    values = gaussian(64, 256)
    groups = values.reshape(64, 8, 32)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    plain = np.rint((groups - low) / (high - low) * 15) * ((high - low) / 15) + low
    error = ((pack_floats(values, AS_INT4).reshape(groups.shape) - groups) ** 2).sum(axis=-1)
    plain_error = ((plain - groups) ** 2).sum(axis=-1)
    assert error.sum() < 0.95 * plain_error.sum()
    assert (error <= 1.01 * plain_error).all()


@pytest.mark.parametrize("form", [AS_INT8, AS_INT4])
def test_numbers_that_are_all_alike_or_zero_stay_so(form: Format) -> None:
    values = np.zeros((5, 64), np.float32)
    values[1:3] = [[1.5], [-0.25]]
    values[3, :32], values[4] = 2.0, 1e-30
    packed = pack_floats(values, form)
    np.testing.assert_allclose(packed, values, rtol=2**-10, atol=1e-29)
    assert (packed[0] == 0).all()


def test_int4_of_numbers_far_from_zero_is_fitted_to_their_range() -> None:
    values = 100 + gaussian(16, 32)
    spread = values.max(axis=-1, keepdims=True) - values.min(axis=-1, keepdims=True)
    # The minimum, a float16 near 100, is itself off by 1/32 at most.
    assert (np.abs(pack_floats(values, AS_INT4) - values) <= spread / 15 + 1 / 32).all()


@pytest.mark.parametrize("form", FLOAT_FORMATS)
def test_a_row_is_packed_alike_whatever_its_neighbours(form: Format) -> None:
    values = gaussian(50, 96)
    order = np.random.default_rng(1).permutation(50)
    np.testing.assert_array_equal(pack_floats(values, form)[order], pack_floats(values[order], form))


@pytest.mark.parametrize("form", FLOAT_FORMATS)
def test_rows_and_columns_are_padded_with_zeros(form: Format) -> None:
    values = gaussian(19, 50)
    packed = pack("F32", form, 50, values.view(np.uint8))
    padded = unpack(form, 32, 64, packed)
    np.testing.assert_array_equal(padded[:19, :50], pack_floats(values, form))
    assert (padded[19:] == 0).all()
    if not form.has_min:  # there a column of padding has the code 0, and counts for nothing because its activation is 0
        assert (padded[:, 50:] == 0).all()


@pytest.mark.parametrize("form", FLOAT_FORMATS)
def test_the_number_of_threads_changes_no_byte(form: Format) -> None:
    values = gaussian(1030, 4096)
    assert _native.matrix_bytes(form, *values.shape) > 2 << 20  # else one thread does it all
    one, many = (pack("F32", form, 4096, values.view(np.uint8), threads) for threads in (1, 7))
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("form", FLOAT_FORMATS)
def test_a_range_of_rows_packs_as_it_does_within_the_matrix(form: Format) -> None:
    values = gaussian(48, 64)
    whole = pack("F32", form, 64, values.view(np.uint8))
    part = pack("F32", form, 64, values[16:].view(np.uint8))
    np.testing.assert_array_equal(whole[-len(part) :], part)


def fault_of(kind: str, form: Format, cols: int, rows: Bytes, threads: int = 1) -> tuple[int, str] | None:
    out = np.empty(_native.matrix_bytes(form, len(rows), cols), np.uint8)
    fault: tuple[int, str] | None = _native.pack_rows(kind, form, cols, rows, out, threads)
    return fault


@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize(("kind", "offset"), [(kind, offset) for kind, offsets in SCALE_OFFSETS.items() for offset in offsets])
def test_a_scale_that_is_no_number_is_a_fault_of_its_row(kind: str, offset: int, bad: int) -> None:
    source = SOURCE_TYPES[kind]
    stored = random_blocks(kind, 20, 2)
    for row in (17, 18):
        at = source.block_bytes + offset
        stored[row, at : at + 2] = np.array([bad], np.uint16).view(np.uint8)
    assert fault_of(kind, source.format, 2 * source.block_cols, stored) == (17, "a weight or a scale that is NaN or infinite")


def test_mxfp4s_nan_and_what_lies_beyond_float32_are_faults() -> None:
    source = SOURCE_TYPES["MXFP4"]
    for exponent in (253, 255):
        stored = random_blocks("MXFP4", 3, 1)
        stored[1, 0] = exponent
        assert fault_of("MXFP4", source.format, 32, stored) == (1, "a weight or a scale that is NaN or infinite")


@pytest.mark.parametrize("form", FLOAT_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_float_that_is_no_number_is_a_fault_of_its_row(form: Format, bad: float) -> None:
    values = gaussian(1030, 4096)
    values[700, 4095] = values[900, 0] = bad
    for threads in (1, 5):
        assert fault_of("F32", form, 4096, values.view(np.uint8), threads) == (700, "a weight or a scale that is NaN or infinite")


@pytest.mark.parametrize(("form", "large"), [(AS_BF16, 3.4028e38), (AS_INT8, 8.4e6), (AS_INT4, 3e6), (AS_INT4, 3e38)])
def test_a_float_too_large_for_its_format_is_a_fault_of_its_row(form: Format, large: float) -> None:
    values = gaussian(4, 64)
    values[2, 40], values[2, 41] = large, -large
    assert fault_of("F32", form, 64, values.view(np.uint8)) == (2, "a weight that is too large for the packed format")


def test_sizes_that_dont_fit_together_are_refused() -> None:
    stored = random_blocks("Q4_0", 16, 2)
    form = SOURCE_TYPES["Q4_0"].format
    out = np.empty(_native.matrix_bytes(form, 16, 64), np.uint8)
    for kind, wrong, cols, rows, into in (
        ("Q4_0", form, 96, stored, out),  # more columns than the rows hold
        ("Q4_0", form, 48, stored[:, :27], out),  # half a block
        ("Q4_0", form, 64, stored, out[:-1]),
        ("Q4_0", AS_INT8, 64, stored, out),  # another format than the type's own
        ("F32", SOURCE_TYPES["Q6_K"].format, 9, stored, out),
        ("IQ1_S", form, 64, stored, out),
        ("Q4_0", (7, False, False, 32), 64, stored, out),
    ):
        with pytest.raises(ValueError):
            _native.pack_rows(kind, wrong, cols, np.ascontiguousarray(rows), into, 1)


@pytest.mark.parametrize(("rows", "cols"), [(0, 32), (1, 0), (-1, 32), (1 << 31, 32), (1, (1 << 31) - 1)])
def test_sizes_that_no_matrix_has_are_refused(rows: int, cols: int) -> None:
    with pytest.raises(ValueError):
        _native.matrix_bytes(AS_BF16, rows, cols)


@pytest.mark.parametrize("form", [(INT4, False, False, 16), (INT8, False, False, 8), (BF16, True, False, 32), (BF16, False, True, 32)])
def test_formats_that_the_layout_lacks_are_refused(form: tuple[int, bool, bool, int]) -> None:
    with pytest.raises(ValueError):
        _native.matrix_bytes(form, 16, 64)
