// float16 and bfloat16 as bit patterns, converted without instructions that not every processor has. No step meets a subnormal float, so that
// nothing depends on whether the thread flushes those. Static: the kernels have conversions of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sterna {

static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename T>
static inline T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
static inline void store(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

static inline bool is_finite(float value) { return (bits_of(value) & 0x7f800000) != 0x7f800000; }

static inline bool all_finite(const float* values, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t exponent = bits_of(values[i]) & 0x7f800000;
    most = exponent > most ? exponent : most;
  }
  return most != 0x7f800000;
}

// Exact. Without branches, so that loops over it are vectorized.
static inline float float16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff, shifted = magnitude << 13;
  const uint32_t subnormal = bits_of(float_of(shifted + 0x38800000) - 0x1p-14f);
  const uint32_t infinite = magnitude >= 0x7c00 ? 0x7f800000 : 0;
  return float_of(sign | infinite | (magnitude < 0x0400 ? subnormal : shifted + 0x38000000));
}

// To nearest even; what is too large becomes infinite. The value is a number.
static inline uint16_t float_to_float16(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000, magnitude = bits_of(value) & 0x7fffffff;
  if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

static inline float bfloat16_to_float(uint16_t value) { return float_of(uint32_t(value) << 16); }

// To nearest even; what is too large becomes infinite. The value is a number.
static inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace sterna
