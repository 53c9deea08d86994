// Lanes (lanes.h) as two 256-bit registers, lanes 0 .. 7 and 8 .. 15.
#pragma once

#include <immintrin.h>

#include "matrix.h"

namespace sterna {
namespace {

#define STERNA_MATHS STERNA_INLINE

struct Lanes {
  __m256 lo, hi;
};
struct Mask {
  __m256 lo, hi;
};
struct Halves {
  __m256i v;
};
struct Pairs {
  __m256i lo, hi;
};

STERNA_INLINE Mask first(int n) {
  const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), iota))};
}
STERNA_INLINE Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
STERNA_INLINE uint32_t bits(Mask m) { return uint32_t(_mm256_movemask_ps(m.lo)) | uint32_t(_mm256_movemask_ps(m.hi)) << 8; }
STERNA_INLINE Lanes select(Mask m, Lanes a, Lanes b) { return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)}; }

STERNA_INLINE Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
STERNA_INLINE Lanes set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
STERNA_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
STERNA_INLINE Lanes load(const float* p, int n) {
  if (__builtin_constant_p(n) && n == 16) return load(p);
  const Mask m = first(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
STERNA_INLINE void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
STERNA_INLINE void store(float* p, Lanes x, int n) {
  if (__builtin_constant_p(n) && n == 16) return store(p, x);
  const Mask m = first(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), x.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), x.hi);
}

STERNA_INLINE Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
STERNA_INLINE Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
STERNA_INLINE Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
STERNA_INLINE Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
STERNA_INLINE Lanes sqrt(Lanes a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
STERNA_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
STERNA_INLINE Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
STERNA_INLINE Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

STERNA_INLINE Mask less(Lanes a, Lanes b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
STERNA_INLINE Mask less_equal(Lanes a, Lanes b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)}; }
STERNA_INLINE Mask unordered(Lanes a, Lanes b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q)}; }

STERNA_INLINE float reduce_add(__m256 x) {
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ps(twos, _mm_movehdup_ps(twos)));
}
STERNA_INLINE float reduce_add(Lanes x) { return reduce_add(_mm256_add_ps(x.lo, x.hi)); }
STERNA_INLINE float reduce_max(__m256 x) {
  const __m128 fours = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_max_ps(twos, _mm_movehdup_ps(twos)));
}
STERNA_INLINE float reduce_max(Lanes x) { return reduce_max(_mm256_max_ps(x.lo, x.hi)); }

STERNA_INLINE Lanes abs(Lanes x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
STERNA_INLINE Lanes copy_sign(Lanes magnitude, Lanes sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.lo), _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.hi), _mm256_and_ps(bit, sign.hi))};
}
STERNA_INLINE Lanes round_even(Lanes x) {
  return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
STERNA_INLINE __m256 add_exponent(__m256 y, __m256 t) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
STERNA_INLINE Lanes add_exponent(Lanes y, Lanes t) { return {add_exponent(y.lo, t.lo), add_exponent(y.hi, t.hi)}; }
STERNA_INLINE void store_int8(int8_t* p, Lanes x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));  // 0-3 8-11 | 4-7 12-15
  const __m256i in_order = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// A bfloat16 in the low half of each lane.
STERNA_INLINE __m256i narrow(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
  const __m256i tiny = _mm256_cmpeq_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x7f800000)), _mm256_setzero_si256());
  r = _mm256_blendv_epi8(r, _mm256_and_si256(u, _mm256_set1_epi32(int(0x80000000u))), tiny);
  return _mm256_srli_epi32(r, 16);
}
STERNA_INLINE Halves narrow(Lanes x) { return {_mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.lo), narrow(x.hi)), 0xD8)}; }
STERNA_INLINE Lanes widen(Halves h) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h.v)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h.v, 1)), 16))};
}
STERNA_INLINE Halves load_halves(const uint16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
STERNA_INLINE void store_halves(uint16_t* p, Halves h) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h.v); }

STERNA_INLINE Pairs load_pairs(const void* p) {
  const __m256i* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
STERNA_INLINE void store_pairs(void* p, Pairs a) {
  __m256i* v = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(v, a.lo);
  _mm256_storeu_si256(v + 1, a.hi);
}
STERNA_INLINE Pairs narrow_pairs(Lanes a, Lanes b) { return {narrow(a).v, narrow(b).v}; }
STERNA_INLINE Pairs set1_pairs(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
STERNA_INLINE Pairs keep_pairs(Pairs a, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(int(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
STERNA_INLINE __m256 even(__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
STERNA_INLINE __m256 odd(__m256i a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000u)))); }
STERNA_INLINE Lanes dot_pairs(Lanes acc, Pairs a, Pairs b) {
  return {_mm256_fmadd_ps(even(a.lo), even(b.lo), _mm256_fmadd_ps(odd(a.lo), odd(b.lo), acc.lo)),
          _mm256_fmadd_ps(even(a.hi), even(b.hi), _mm256_fmadd_ps(odd(a.hi), odd(b.hi), acc.hi))};
}

}  // namespace
}  // namespace sterna
