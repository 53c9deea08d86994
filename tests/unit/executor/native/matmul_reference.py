"""Matrix products and activations in NumPy, float32 step by float32 step, from the words of csrc/kernels/{matrix.h,kernels.h} alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT4, INT8, BF16 = 0, 1, 2
Form = tuple[int, bool, bool, int]
FORMS: list[Form] = [
    *((INT4, has_min, wide, 32) for has_min in (False, True) for wide in (False, True)),
    *((INT8, has_min, wide, group) for has_min in (False, True) for wide in (False, True) for group in (32, 16)),
    (BF16, False, False, 32),
]


def name(form: Form) -> str:
    quant, has_min, wide, group = form
    return "bf16" if quant == BF16 else f"{('int4', 'int8')[quant]}{'+min' if has_min else ''}-{'f32' if wide else 'f16'}-{group}"


def fused(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """fma of float32, rounded once: the float64 sum is made odd where it is not exact, so that rounding it again cannot err."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
    total = product + addend
    behind = total - product
    error = (product - (total - behind)) + (addend - behind)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd = np.where(even & (error != 0), np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)


@dataclass(frozen=True)
class Weights:
    """A matrix in its parts. codes: uint8 [rows, cols], or uint16 bfloat16; d and m: float16 or float32 [rows, scales]."""

    form: Form
    codes: NDArray[Any]
    d: NDArray[Any]
    m: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def data(self) -> NDArray[np.uint8]:
        """As it lies in memory."""
        quant, has_min, _, scale_group = self.form
        rows, cols = self.shape
        blocks, groups = -(-rows // 16), -(-cols // 32)
        codes = np.zeros((blocks * 16, groups * 32), self.codes.dtype)
        codes[:rows, :cols] = self.codes
        if quant == BF16:
            return codes.reshape(blocks, 16, groups * 16, 2).swapaxes(1, 2).ravel().view(np.uint8)
        vectors = codes.reshape(blocks, 16, groups, 8, 4).transpose(0, 2, 3, 1, 4)  # (blocks, groups, 8, 16 rows, 4)
        if quant == INT4:
            vectors = vectors[:, :, :4] | vectors[:, :, 4:] << 4
        parts = [vectors.reshape(blocks, groups, -1)]
        for numbers in (self.d, self.m) if has_min else (self.d,):
            padded = np.zeros((blocks * 16, groups * 32 // scale_group), numbers.dtype)
            padded[:rows, : numbers.shape[1]] = numbers
            lanes = padded.reshape(blocks, 16, groups, -1).transpose(0, 2, 3, 1)
            parts.append(np.ascontiguousarray(lanes).view(np.uint8).reshape(blocks, groups, -1))
        block = np.concatenate(parts, axis=2).reshape(blocks, -1)
        return np.pad(block, ((0, 0), (0, -block.shape[1] % 64))).ravel()

    def dequantized(self) -> NDArray[np.float32]:
        quant, has_min, _, scale_group = self.form
        if quant == BF16:
            return (self.codes.astype(np.uint32) << 16).view(np.float32)
        spread = [np.repeat(each.astype(np.float32), scale_group, axis=1)[:, : self.shape[1]] for each in (self.d, self.m)]
        if has_min:
            return fused(spread[0], self.codes, spread[1])
        return spread[0] * (self.codes.astype(np.float32) - np.float32(8 if quant == INT4 else 128))


def random_weights(form: Form, rows: int, cols: int, seed: int, spread: float = 0.02) -> Weights:
    rng = np.random.default_rng(seed)
    quant, _, wide, scale_group = form
    if quant == BF16:
        values = (rng.standard_normal((rows, cols)) * spread).astype(np.float32)
        return Weights(form, (values.view(np.uint32) >> 16).astype(np.uint16), np.zeros((rows, 0)), np.zeros((rows, 0)))
    codes = rng.integers(0, 16 if quant == INT4 else 256, (rows, cols), dtype=np.uint8)
    scales = (rng.standard_normal((2, rows, -(-cols // scale_group))) * spread).astype(np.float32 if wide else np.float16)
    return Weights(form, codes, scales[0], scales[1])


@dataclass(frozen=True)
class Quantized:
    """q: int8 [groups, 32]; d: float32 [groups]. refined: which groups are; refinement: what they were refined by."""

    q: NDArray[np.int8]
    d: NDArray[np.float32]
    refined: tuple[int, ...] = ()
    refinement: "Quantized | None" = None

    def sums(self, group: int) -> NDArray[np.int64]:
        """[groups, 32 / group]"""
        return self.q.astype(np.int64).reshape(len(self.q), 32 // group, group).sum(axis=2)


def quantize(x: NDArray[np.float32]) -> Quantized:
    groups = np.zeros(-(-len(x) // 32) * 32, np.float32)
    groups[: len(x)] = x
    groups = groups.reshape(-1, 32)
    first = _quantize_groups(groups)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = first.d * first.d
        squares[squares < np.float32(2.0**-126)] = 0  # subnormals count as zeros
        limit = np.add.accumulate(squares, dtype=np.float32)[-1] / np.float32(len(groups)) * np.float32(4)
        refined = np.flatnonzero(squares > limit)
    rest = groups[refined] - first.d[refined, None] * first.q[refined].astype(np.float32)
    return Quantized(first.q, first.d, tuple(refined.tolist()), _quantize_groups(rest))


def _quantize_groups(groups: NDArray[np.float32]) -> Quantized:
    """groups: float32 [any, 32]"""
    maximum = np.abs(groups).max(axis=1)  # NaN where there is one
    finite = np.isfinite(maximum)
    counts = finite & (maximum >= np.float32(2.0**-118))
    divisor = np.where(counts, maximum, np.float32(1))
    d = np.where(counts, divisor / np.float32(127), np.where(finite, np.float32(0), np.float32(np.nan)))
    kept = np.where(counts[:, None], groups, np.float32(0))
    return Quantized(np.rint(kept * (np.float32(127) / divisor)[:, None]).astype(np.int8), d.astype(np.float32))


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To nearest even; subnormals to zero. x has no NaN."""
    u = x.view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + (u >> 16 & np.uint32(1))) >> 16
    return np.where(np.abs(x) < np.float32(2.0**-126), u >> 16 & np.uint32(0x8000), rounded).astype(np.uint16)


def matmul(w: Weights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x [M, cols] -> [M, rows]"""
    return np.stack([_bf16_row(w, row) if w.form[0] == BF16 else _int_row(w, quantize(row)) for row in x])


def _int_row(w: Weights, x: Quantized) -> NDArray[np.float32]:
    quant, has_min, _, group = w.form
    rows, cols = w.shape
    signed = np.zeros((rows, len(x.q) * 32), np.int64)
    signed[:, :cols] = w.codes.astype(np.int64) - (0 if has_min else 8 if quant == INT4 else 128)
    acc = np.zeros(rows, np.float32)
    assert x.refinement is not None
    for which, part in ((range(len(x.q)), x), (x.refined, x.refinement)):
        activations, sums = part.q.astype(np.int64).reshape(-1, group), part.sums(group).ravel()
        scales = [(at * 32 // group + half, i * 32 // group + half) for i, at in enumerate(which) for half in range(32 // group)]
        for scale, i in scales:
            if scale == w.d.shape[1]:  # a half group of padding
                continue
            codes, q, total = signed[:, scale * group : (scale + 1) * group], activations[i], sums[i]
            d = part.d[i * group // 32]
            acc = fused((codes @ q).astype(np.float32), w.d[:, scale].astype(np.float32) * d, acc)
            if has_min:
                acc = fused(w.m[:, scale].astype(np.float32), d * np.float32(total), acc)
    return acc


def _bf16_row(w: Weights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = w.dequantized()
    row = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    acc = np.zeros(len(weights), np.float32)
    for i in range(0, len(row), 2):
        if i + 1 < len(row):
            acc = fused(weights[:, i + 1], row[i + 1], acc)
        acc = fused(weights[:, i], row[i], acc)
    return acc
