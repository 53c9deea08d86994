// Lanes (lanes.h) as one 512-bit register; bfloat16 products in one instruction with STERNA_HAS_DPBF16, which flushes subnormals whatever the mode.
#pragma once

#include "matrix.h"

// GCC 12 finds the header's own "undefined" vectors undefined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace sterna {
namespace {

#define STERNA_MATHS STERNA_INLINE

struct Lanes {
  __m512 v;
};
struct Mask {
  __mmask16 v;
};
struct Halves {
  __m256i v;
};
struct Pairs {
  __m512i v;
};

STERNA_INLINE Mask first(int n) { return {__mmask16((1u << n) - 1)}; }
STERNA_INLINE Mask both(Mask a, Mask b) { return {__mmask16(a.v & b.v)}; }
STERNA_INLINE uint32_t bits(Mask m) { return m.v; }
STERNA_INLINE Lanes select(Mask m, Lanes a, Lanes b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }

STERNA_INLINE Lanes zero() { return {_mm512_setzero_ps()}; }
STERNA_INLINE Lanes set1(float x) { return {_mm512_set1_ps(x)}; }
STERNA_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
STERNA_INLINE Lanes load(const float* p, int n) {
  if (__builtin_constant_p(n) && n == 16) return load(p);
  return {_mm512_maskz_loadu_ps(first(n).v, p)};
}
STERNA_INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
STERNA_INLINE void store(float* p, Lanes x, int n) {
  if (__builtin_constant_p(n) && n == 16) return store(p, x);
  _mm512_mask_storeu_ps(p, first(n).v, x.v);
}

STERNA_INLINE Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
STERNA_INLINE Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
STERNA_INLINE Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
STERNA_INLINE Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
STERNA_INLINE Lanes sqrt(Lanes a) { return {_mm512_sqrt_ps(a.v)}; }
STERNA_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
STERNA_INLINE Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
STERNA_INLINE Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }

STERNA_INLINE Mask less(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
STERNA_INLINE Mask less_equal(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
STERNA_INLINE Mask unordered(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }

STERNA_INLINE float reduce_add(__m256 x) {
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ps(twos, _mm_movehdup_ps(twos)));
}
STERNA_INLINE float reduce_add(Lanes x) { return reduce_add(_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1))); }
STERNA_INLINE float reduce_max(__m256 x) {
  const __m128 fours = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_max_ps(twos, _mm_movehdup_ps(twos)));
}
STERNA_INLINE float reduce_max(Lanes x) { return reduce_max(_mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1))); }

STERNA_INLINE Lanes abs(Lanes x) { return {_mm512_abs_ps(x.v)}; }
STERNA_INLINE Lanes copy_sign(Lanes magnitude, Lanes sign) {
  const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
  // 0xCA: the first operand's bits choose between the second's and the third's.
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v), _mm512_castps_si512(magnitude.v), 0xCA))};
}
STERNA_INLINE Lanes round_even(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
STERNA_INLINE Lanes add_exponent(Lanes y, Lanes t) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y.v), _mm512_slli_epi32(_mm512_castps_si512(t.v), 23)))};
}
STERNA_INLINE void store_int8(int8_t* p, Lanes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

#if defined(STERNA_HAS_DPBF16)
STERNA_INLINE Halves narrow(Lanes x) { return {(__m256i)_mm512_cvtneps_pbh(x.v)}; }
STERNA_INLINE Pairs narrow_pairs(Lanes a, Lanes b) { return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)}; }
#else
STERNA_INLINE Halves narrow(Lanes x) {
  const __m512i u = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
  r = _mm512_mask_and_epi32(r, _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x7f800000)), u, _mm512_set1_epi32(int(0x80000000u)));
  return {_mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16))};
}
STERNA_INLINE Pairs narrow_pairs(Lanes a, Lanes b) { return {_mm512_inserti64x4(_mm512_castsi256_si512(narrow(a).v), narrow(b).v, 1)}; }
#endif
STERNA_INLINE Lanes widen(Halves h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h.v), 16))}; }
STERNA_INLINE Halves load_halves(const uint16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
STERNA_INLINE void store_halves(uint16_t* p, Halves h) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h.v); }

STERNA_INLINE Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
STERNA_INLINE void store_pairs(void* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
STERNA_INLINE Pairs set1_pairs(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
STERNA_INLINE Pairs keep_pairs(Pairs a, uint32_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(int(mask)))}; }
#if defined(STERNA_HAS_DPBF16)
STERNA_INLINE Lanes dot_pairs(Lanes acc, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#else
STERNA_INLINE __m512 even(Pairs a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)); }
STERNA_INLINE __m512 odd(Pairs a) { return _mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(int(0xffff0000u)))); }
STERNA_INLINE Lanes dot_pairs(Lanes acc, Pairs a, Pairs b) {
  return {_mm512_fmadd_ps(even(a), even(b), _mm512_fmadd_ps(odd(a), odd(b), acc.v))};
}
#endif

}  // namespace
}  // namespace sterna
