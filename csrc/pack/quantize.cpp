#include "quantize.h"

#include <algorithm>

#include "kernels/matrix.h"
#include "numbers.h"

namespace sterna {

namespace {

constexpr int kMostCode = 15;
constexpr int kRanges = 9;
constexpr float kNarrower = 0.04f;  // each range is narrower than the one before by this part of the whole
constexpr int kLanes = 4;           // what every processor's vectors have; sums run over them, and then over these
constexpr int kVectors = kGroup / kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

float sum(Floats lanes) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); }

float round_to_float16(float value) { return float16_to_float(float_to_float16(value)); }

// Halves to even, for numbers below 2^22.
float round_to_integer(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

struct Affine {
  float scale;
  float minimum;
};

float inverse_of(float scale) { return scale >= 0x1p-126f ? 1 / scale : 0; }  // finite

Floats encode(Floats values, Affine fit, float inverse) {
  const Floats zero{}, most = zero + float(kMostCode);
  Floats at = (values - fit.minimum) * inverse;
  at = at > zero ? at : zero;
  at = at < most ? at : most;
  return __builtin_convertvector(__builtin_convertvector(at + 0.5f, Ints), Floats);
}

// What the least-squares fit and its error need of the codes and of the numbers' distances from the range's minimum: the numbers themselves, where
// they are alike and far from zero, would cancel.
struct Sums {
  float q, qq, qx;
};

Sums sums_of(const Floats (&values)[kVectors], Affine range) {
  const float inverse = inverse_of(range.scale);
  Floats q{}, qq{}, qx{};
  for (const Floats& each : values) {
    const Floats code = encode(each, range, inverse);
    q += code;
    qq += code * code;
    qx += code * (each - range.minimum);
  }
  return {sum(q), sum(qq), sum(qx)};
}

}  // namespace

bool quantize_int8(const float* values, uint8_t* codes, float* scale) {
  int32_t most = 0;
  for (int i = 0; i < kGroup; ++i) most = std::max(most, int32_t(bits_of(values[i]) & 0x7fffffff));
  *scale = round_to_float16(float_of(uint32_t(most)) / 127);
  if (!is_finite(*scale)) return false;
  const float inverse = inverse_of(*scale);
  for (int i = 0; i < kGroup; ++i) {
    // A scale that was rounded down, as a tiny one may be by much, leaves codes beyond 127.
    float at = values[i] * inverse;
    at = at > -127 ? at : -127;
    at = at < 127 ? at : 127;
    codes[i] = uint8_t(int(round_to_integer(at)) + 128);
  }
  return true;
}

bool quantize_int4(const float* values, uint8_t* codes, float* scale, float* minimum) {
  Floats group[kVectors];
  std::memcpy(group, values, sizeof group);
  const float low = *std::min_element(values, values + kGroup), width = *std::max_element(values, values + kGroup) - low;
  if (!is_finite(width)) return false;
  Floats distances{}, squares{};
  for (const Floats& each : group) {
    distances += each - low;
    squares += (each - low) * (each - low);
  }
  const float n = kGroup, x = sum(distances), xx = sum(squares);  // of distances from `low`
  Affine best{};
  float least = -1;
  for (int step = 0; step < kRanges; ++step) {
    const float cut = width * kNarrower * float(step) / 2;
    const Affine range{(width - 2 * cut) / kMostCode, low + cut};
    auto [q, qq, qx] = sums_of(group, range);
    qx += q * cut;  // from distances to `range` to those from `low`
    const float determinant = n * qq - q * q;
    Affine fit = range;
    if (determinant > 0 && n * qx > q * x) {
      fit.scale = (n * qx - q * x) / determinant;
      fit.minimum = low + (x - fit.scale * q) / n;
    }
    const Affine kept{round_to_float16(fit.scale), round_to_float16(fit.minimum)};
    if (!is_finite(kept.scale) || !is_finite(kept.minimum)) continue;
    const float d = kept.scale, m = kept.minimum - low;
    const float error = xx + d * d * qq + n * m * m + 2 * (d * m * q - d * qx - m * x);
    if (least < 0 || error < least) {
      least = std::max(error, 0.0f);
      best = kept;
    }
  }
  if (least < 0) return false;
  const float inverse = inverse_of(best.scale);
  for (int v = 0; v < kVectors; ++v) {
    const Floats code = encode(group[v], best, inverse);
    for (int lane = 0; lane < kLanes; ++lane) codes[kLanes * v + lane] = uint8_t(code[lane]);
  }
  *scale = best.scale;
  *minimum = best.minimum;
  return true;
}

}  // namespace sterna
