// Lanes (lanes.h) as arrays and plain loops: what the other implementations are tested against.
#pragma once

#include "matrix.h"

namespace sterna {
namespace {

// Functions that come to many instructions. Where every fma is a library call for every lane, copies of them would only make the program large.
#if defined(__FP_FAST_FMAF)
#define STERNA_MATHS STERNA_INLINE
#else
#define STERNA_MATHS __attribute__((noinline))
#endif

struct alignas(64) Lanes {
  float v[16];
};
struct Mask {
  bool v[16];
};
struct Halves {
  uint16_t v[16];
};
struct alignas(64) Pairs {
  uint32_t v[16];
};

STERNA_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
STERNA_INLINE float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// One lane at a time: `each` is an expression in i.
#define STERNA_EACH(type, each)                     \
  type r;                                           \
  for (int i = 0; i < 16; i++) r.v[i] = (each);     \
  return r

STERNA_INLINE Mask first(int n) { STERNA_EACH(Mask, i < n); }
STERNA_INLINE Mask both(Mask a, Mask b) { STERNA_EACH(Mask, a.v[i] && b.v[i]); }
STERNA_INLINE uint32_t bits(Mask m) {
  uint32_t r = 0;
  for (int i = 0; i < 16; i++) r |= uint32_t(m.v[i]) << i;
  return r;
}
STERNA_INLINE Lanes select(Mask m, Lanes a, Lanes b) { STERNA_EACH(Lanes, m.v[i] ? a.v[i] : b.v[i]); }

STERNA_INLINE Lanes set1(float x) { STERNA_EACH(Lanes, x); }
STERNA_INLINE Lanes zero() { return set1(0.0f); }
STERNA_INLINE Lanes load(const float* p) { STERNA_EACH(Lanes, p[i]); }
STERNA_INLINE Lanes load(const float* p, int n) { STERNA_EACH(Lanes, i < n ? p[i] : 0.0f); }
STERNA_INLINE void store(float* p, Lanes x) { __builtin_memcpy(p, x.v, sizeof x.v); }
STERNA_INLINE void store(float* p, Lanes x, int n) {
  for (int i = 0; i < n; i++) p[i] = x.v[i];
}

STERNA_INLINE Lanes add(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] + b.v[i]); }
STERNA_INLINE Lanes sub(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] - b.v[i]); }
STERNA_INLINE Lanes mul(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] * b.v[i]); }
STERNA_INLINE Lanes div(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] / b.v[i]); }
STERNA_INLINE Lanes sqrt(Lanes a) { STERNA_EACH(Lanes, __builtin_sqrtf(a.v[i])); }
STERNA_MATHS Lanes fma(Lanes a, Lanes b, Lanes c) { STERNA_EACH(Lanes, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
STERNA_INLINE Lanes max(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
STERNA_INLINE Lanes min(Lanes a, Lanes b) { STERNA_EACH(Lanes, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }

STERNA_INLINE Mask less(Lanes a, Lanes b) { STERNA_EACH(Mask, a.v[i] < b.v[i]); }
STERNA_INLINE Mask less_equal(Lanes a, Lanes b) { STERNA_EACH(Mask, a.v[i] <= b.v[i]); }
STERNA_INLINE Mask unordered(Lanes a, Lanes b) { STERNA_EACH(Mask, a.v[i] != a.v[i] || b.v[i] != b.v[i]); }

STERNA_INLINE float reduce_add(Lanes x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] = x.v[i] + x.v[i + half];
  return x.v[0];
}
STERNA_INLINE float reduce_max(Lanes x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  return x.v[0];
}

STERNA_INLINE float copy_sign(float magnitude, float sign) { return float_of((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u)); }
STERNA_INLINE Lanes abs(Lanes x) { STERNA_EACH(Lanes, copy_sign(x.v[i], 0.0f)); }
STERNA_INLINE Lanes copy_sign(Lanes magnitude, Lanes sign) { STERNA_EACH(Lanes, copy_sign(magnitude.v[i], sign.v[i])); }
STERNA_INLINE float round_even(float x) {
  const float magnitude = copy_sign(x, 0.0f);
  const float whole = magnitude < 8388608.0f ? (magnitude + 8388608.0f) - 8388608.0f : magnitude;  // 2^23: no fraction from there
  return copy_sign(whole, x);
}
STERNA_INLINE Lanes round_even(Lanes x) { STERNA_EACH(Lanes, round_even(x.v[i])); }
STERNA_INLINE Lanes add_exponent(Lanes y, Lanes t) { STERNA_EACH(Lanes, float_of(bits_of(y.v[i]) + (bits_of(t.v[i]) << 23))); }
STERNA_INLINE void store_int8(int8_t* p, Lanes x) {
  for (int i = 0; i < 16; i++) p[i] = int8_t(int(x.v[i]));
}

STERNA_INLINE uint16_t narrow(float x) {
  const uint32_t u = bits_of(x);
  if (x != x) return uint16_t(u >> 16 | 0x40);
  if ((u & 0x7f800000u) == 0) return uint16_t(u >> 16 & 0x8000);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
STERNA_INLINE Halves narrow(Lanes x) { STERNA_EACH(Halves, narrow(x.v[i])); }
STERNA_INLINE Lanes widen(Halves h) { STERNA_EACH(Lanes, float_of(uint32_t(h.v[i]) << 16)); }
STERNA_INLINE Halves load_halves(const uint16_t* p) { STERNA_EACH(Halves, p[i]); }
STERNA_INLINE void store_halves(uint16_t* p, Halves h) { __builtin_memcpy(p, h.v, sizeof h.v); }

STERNA_INLINE Pairs load_pairs(const void* p) {
  Pairs r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
STERNA_INLINE void store_pairs(void* p, Pairs a) { __builtin_memcpy(p, a.v, sizeof a.v); }
STERNA_INLINE Pairs narrow_pairs(Lanes a, Lanes b) {
  uint16_t halves[32];
  store_halves(halves, narrow(a));
  store_halves(halves + 16, narrow(b));
  return load_pairs(halves);
}
STERNA_INLINE Pairs set1_pairs(const uint16_t* p) {
  uint32_t pair;
  __builtin_memcpy(&pair, p, 4);
  STERNA_EACH(Pairs, pair);
}
STERNA_INLINE Pairs keep_pairs(Pairs a, uint32_t mask) { STERNA_EACH(Pairs, a.v[i] & mask); }
STERNA_INLINE Lanes even(Pairs a) { STERNA_EACH(Lanes, float_of(a.v[i] << 16)); }
STERNA_INLINE Lanes odd(Pairs a) { STERNA_EACH(Lanes, float_of(a.v[i] & 0xffff0000u)); }
STERNA_INLINE Lanes dot_pairs(Lanes acc, Pairs a, Pairs b) { return fma(even(a), even(b), fma(odd(a), odd(b), acc)); }

#undef STERNA_EACH

}  // namespace
}  // namespace sterna
