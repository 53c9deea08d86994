#include "quantize.h"

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace sterna {

namespace {

constexpr int kMostCode = 15;
constexpr int kRanges = 9;
constexpr float kNarrower = 0.04f;  // each range is narrower than the one before by this part of the whole

float round_to_float16(float value) { return float16_to_float(float_to_float16(value)); }

struct Affine {
  float scale;
  float minimum;
};

void encode(const float* values, int count, Affine fit, float* codes) {
  const float inverse = fit.scale >= 0x1p-126f ? 1 / fit.scale : 0;  // finite
  for (int i = 0; i < count; ++i) {
    const float at = std::min(std::max((values[i] - fit.minimum) * inverse, 0.0f), float(kMostCode));
    codes[i] = float(int(at + 0.5f));
  }
}

float squared_error(const float* values, const float* codes, int count, Affine fit) {
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    const float error = fit.scale * codes[i] + fit.minimum - values[i];
    sum += error * error;
  }
  return sum;
}

// The scale and minimum that suit the codes best; `range`, of which the codes are, where all codes are one or the scale would not be positive.
// Sums are of distances from the range's minimum: those of numbers that are alike and far from zero would cancel.
Affine least_squares(const float* values, const float* codes, int count, Affine range) {
  float q = 0, qq = 0, x = 0, qx = 0;
  for (int i = 0; i < count; ++i) {
    const float distance = values[i] - range.minimum;
    q += codes[i];
    qq += codes[i] * codes[i];
    x += distance;
    qx += codes[i] * distance;
  }
  const float n = float(count), determinant = n * qq - q * q;
  if (!(determinant > 0)) return range;
  const float scale = (n * qx - q * x) / determinant;
  if (!(scale > 0)) return range;
  return {scale, range.minimum + (x - scale * q) / n};
}

}  // namespace

bool quantize_int8(const float* values, int count, uint8_t* codes, float* scale) {
  float most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(values[i]));
  *scale = round_to_float16(most / 127);
  if (!is_finite(*scale)) return false;
  const float inverse = *scale > 0 ? 1 / *scale : 0;
  for (int i = 0; i < count; ++i) {
    // A scale that was rounded down, as a tiny one may be by much, leaves codes beyond 127.
    const float at = std::min(std::max(values[i] * inverse, -127.0f), 127.0f);
    codes[i] = uint8_t(int(std::nearbyint(at)) + 128);
  }
  return true;
}

bool quantize_int4(const float* values, int count, uint8_t* codes, float* scale, float* minimum) {
  const auto [lowest, highest] = std::minmax_element(values, values + count);
  const float low = *lowest, high = *highest, width = high - low;
  if (!is_finite(width)) return false;
  float trial[32], best[32];
  float least = -1;
  for (int step = 0; step < kRanges; ++step) {
    const float cut = width * kNarrower * float(step) / 2;
    const Affine range{(width - 2 * cut) / kMostCode, low + cut};
    encode(values, count, range, trial);
    const Affine fit = least_squares(values, trial, count, range);
    const Affine kept{round_to_float16(fit.scale), round_to_float16(fit.minimum)};
    if (!is_finite(kept.scale) || !is_finite(kept.minimum)) continue;
    encode(values, count, kept, trial);
    const float error = squared_error(values, trial, count, kept);
    if (least < 0 || error < least) {
      least = error;
      *scale = kept.scale;
      *minimum = kept.minimum;
      std::copy(trial, trial + count, best);
    }
  }
  if (least < 0) return false;
  for (int i = 0; i < count; ++i) codes[i] = uint8_t(best[i]);
  return true;
}

}  // namespace sterna
