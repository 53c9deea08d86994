// Sixteen float lanes: the one vocabulary in which kernels are written, with an implementation per instruction set. Every operation is one IEEE
// operation per lane, so all implementations give the same bits, given a FlushSubnormals scope (flush.h). Bits of NaNs are not promised.
//
// An implementation (lanes_*.h) has the types
//   Lanes   16 float32
//   Mask    16 truth values
//   Halves  16 bfloat16
//   Pairs   16 pairs of bfloat16; the even element of a pair is the low half of its 32 bits
// and the functions
//   zero() set1(f) load(p) load(p, n) store(p, x) store(p, x, n)    n in 0 .. 16: lanes behind n are read as zero, and not written; any alignment
//   add sub mul div sqrt fma(a, b, c) = a * b + c                   rounded once
//   max(a, b) = a > b ? a : b   min(a, b) = a < b ? a : b           so b where either is NaN
//   less less_equal (false with NaN)  unordered(a, b)  first(n): lanes below n  both(a, b)  select(m, a, b): a where m  bits(m): lane i is bit i
//   reduce_add(x)                     by one tree: (((0 + 8) + (4 + 12)) + ((2 + 10) + (6 + 14))) + (the odd lanes alike)
//   reduce_max(x)                     the same tree of max; no lane is NaN
//   abs  copy_sign(magnitude, sign)
//   round_even(x)                     to the nearest integer, ties to even
//   add_exponent(y, t)                y with the low bits of t's representation, as an integer, added to its exponent
//   store_int8(p, x)                  lanes that hold integers in -128 .. 127
//   narrow(x) -> Halves               to nearest even; NaN stays NaN; subnormals become zero
//   widen(h)  load_halves(p)  store_halves(p, h)
//   load_pairs(p)  store_pairs(p, a)  set1_pairs(p): the pair at p in all lanes  keep_pairs(a, bits): bitwise and of every pair with bits
//   narrow_pairs(a, b) -> Pairs       narrow(a) and behind it narrow(b): lanes 0 and 1 are the first pair
//   dot_pairs(acc, a, b) = fma(a.even, b.even, fma(a.odd, b.odd, acc))
//
// and STERNA_MATHS: how functions of many operations are declared, inline or not.
//
// These files are compiled for one instruction set each: everything has internal linkage, and nothing of the standard library's that could be
// emitted under a shared name (templates, inline functions) may be used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"

#if defined(STERNA_LANES_AVX512)
#include "lanes_avx512.h"
#elif defined(STERNA_LANES_AVX2)
#include "lanes_avx2.h"
#elif defined(STERNA_LANES_PORTABLE)
#include "lanes_portable.h"
#else
#error "an isa_*.cpp chooses its lanes"
#endif

namespace sterna {
namespace {

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

// exp of each of x, up to ln(FLT_MAX), within 1 ulp: x = n * ln 2 + r with |r| <= ln 2 / 2; the polynomial is a minimax fit of
// (exp(r) - 1 - r) / r^2. 0 where the result would be subnormal (below -126 ln 2, a little is given away); NaN stays NaN. Several at once are
// written step by step, for the chain of operations is longer than what a processor looks ahead.
template <int kCount>
STERNA_MATHS void exp_bounded(Lanes (&x)[kCount]) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits
  constexpr float kPolynomial[] = {0.0013944677f, 0.008333497f, 0.041666295f, 0.16666666f, 0.5f};
  Lanes t[kCount], r[kCount], q[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) t[i] = fma(x[i], set1(1.44269504f), set1(kMagic));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) r[i] = fma(sub(t[i], set1(kMagic)), set1(-0.693145751953125f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) r[i] = fma(sub(t[i], set1(kMagic)), set1(-1.42860677e-6f), r[i]), q[i] = set1(0.0001979033f);
#pragma GCC unroll 8
  for (float coefficient : kPolynomial) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i++) q[i] = fma(q[i], r[i], set1(coefficient));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) q[i] = add(fma(q[i], mul(r[i], r[i]), r[i]), set1(1.0f));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) x[i] = select(less_equal(set1(-87.3365f), x[i]), add_exponent(q[i], t[i]), max(zero(), x[i]));
}

// exp of each of x, none above 0, within 1.1e-4 of it (exp(0) is 1): a twentieth of what rounding the result to bfloat16 may take from it, and half the
// work. The cubic is a minimax fit of 2^f for |f| <= 1/2. Below -126 ln 2 the result is any number that `narrow` takes to be zero. NaN stays NaN where its low bits are zero,
// as those of bfloat16 and of the processor's own are.
template <int kCount>
STERNA_MATHS void exp_coarse(Lanes (&x)[kCount]) {
  constexpr float kMagic = 12582912.0f;   // as in exp_bounded
  constexpr float kLeast = -88.0f;        // 2^-127 and a little
  constexpr float kLog2e = 1.44269504f;
  constexpr float kCubic[] = {0.24221098f, 0.6932829f, 1.0f};
  Lanes t[kCount], f[kCount], q[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) x[i] = max(set1(kLeast), x[i]), t[i] = fma(x[i], set1(kLog2e), set1(kMagic));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) f[i] = fma(x[i], set1(kLog2e), sub(set1(kMagic), t[i])), q[i] = set1(0.05500906f);
#pragma GCC unroll 8
  for (float coefficient : kCubic) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i++) q[i] = fma(q[i], f[i], set1(coefficient));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i++) x[i] = add_exponent(q[i], t[i]);
}

// exp(x) for any x: +inf above ln(FLT_MAX).
STERNA_MATHS Lanes exp(Lanes x) {
  Lanes y[] = {x};
  exp_bounded(y);
  return select(less(set1(88.7228f), x), set1(kInfinity), y[0]);
}

// tanh(x) within 2 ulp: an odd polynomial below 0.625, 1 - 2 / (exp(2|x|) + 1) from there.
STERNA_MATHS Lanes tanh(Lanes x) {
  const Lanes magnitude = abs(x);
  const Lanes z = mul(x, x);
  Lanes q = fma(set1(-0.005717037f), z, set1(0.020650579f));
  q = fma(q, z, set1(-0.053743497f));
  q = fma(q, z, set1(0.13331491f));
  q = fma(q, z, set1(-0.33333284f));
  const Lanes near = fma(mul(q, z), x, x);
  const Lanes e = exp(add(magnitude, magnitude));
  const Lanes far = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  return copy_sign(select(less(magnitude, set1(0.625f)), near, far), x);
}

// erf(x) within 2 ulp: an odd polynomial below 1, 1 - exp(polynomial) from there, with a fit of log(erfc); 1 from 3.95.
STERNA_MATHS Lanes erf(Lanes x) {
  const Lanes z = mul(x, x);
  Lanes p = fma(set1(7.853858e-05f), z, set1(-0.00080101925f));
  p = fma(p, z, set1(0.0051883277f));
  p = fma(p, z, set1(-0.02685381f));
  p = fma(p, z, set1(0.11283585f));
  p = fma(p, z, set1(-0.37612626f));
  p = fma(p, z, set1(0.12837917f));
  const Lanes near = fma(p, x, x);
  const Lanes t = min(set1(3.95f), abs(x));
  Lanes q = fma(set1(0.00018638006f), t, set1(-0.0029476664f));
  q = fma(q, t, set1(0.021838095f));
  q = fma(q, t, set1(-0.10310681f));
  q = fma(q, t, set1(-0.63814473f));
  q = fma(q, t, set1(-1.1270893f));
  q = fma(q, t, set1(-0.00034151296f));
  const Lanes far = sub(set1(1.0f), exp(q));
  return select(less(abs(x), set1(1.0f)), near, copy_sign(far, x));
}

STERNA_INLINE Lanes softcap(Lanes x, float cap) { return mul(set1(cap), tanh(div(x, set1(cap)))); }

// Behind the parameters of a lambda: a call of its own would cost more than what it does.
#define STERNA_BODY __attribute__((always_inline))

// f(i, count) for i = 0, 16, ... below n; count is 16, or fewer at the end.
template <typename F>
STERNA_INLINE void for_lanes(int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

}  // namespace
}  // namespace sterna
