#include "rope.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "forward.h"

namespace sterna {
namespace {

constexpr float kMost = 0x1p29f;
// Pi / 2 in parts of 24 bits and a rest: the number of quarter turns, below 2^29, times such a part is exact in double.
constexpr double kQuarter[] = {0x1.921fb4p+0, 0x1.4442dp-24, 0x1.846988p-48, 0x1.8cc51701b839ap-72};
constexpr double kQuartersPerRadian = 0x1.45f306dc9c883p-1;
constexpr double kMagic = 0x1.8p52;  // adding it rounds to an integer

// Taylor's series for |r| <= pi / 4, from the highest term on: what is left out is below half an ulp of double.
constexpr double kSine[] = {1 / 355687428096000.0, -1 / 1307674368000.0, 1 / 6227020800.0, -1 / 39916800.0, 1 / 362880.0, -1 / 5040.0, 1 / 120.0, -1 / 6.0};
constexpr double kCosine[] = {1 / 20922789888000.0, -1 / 87178291200.0, 1 / 479001600.0, -1 / 3628800.0, 1 / 40320.0, -1 / 720.0, 1 / 24.0, -1 / 2.0};

double series(const double (&terms)[8], double z) {
  double sum = terms[0];
  for (int i = 1; i < 8; ++i) sum = sum * z + terms[i];
  return sum * z;
}

}  // namespace

Turn turn_by(float angle) {
  if (!(std::fabs(angle) <= kMost)) return {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
  const double quarters = (angle * kQuartersPerRadian + kMagic) - kMagic;
  // A float32 is never so near a multiple of pi / 2 that what the parts leave over would be felt.
  double r = angle;
  for (double part : kQuarter) r -= quarters * part;
  const double sine = r + r * series(kSine, r * r), cosine = 1 + series(kCosine, r * r);
  switch (int32_t(quarters) & 3) {
    case 0: return {float(cosine), float(sine)};
    case 1: return {float(-sine), float(cosine)};
    case 2: return {float(-cosine), float(-sine)};
    default: return {float(sine), float(-cosine)};
  }
}

// The angle itself in float32, as the models were trained.
void Forward::rope_angles(const Step& step) {
  const int tokens = int(step.positions.size());
  for (size_t r = 0; r < model_.ropes.size(); ++r) {
    const Rope& rope = model_.ropes[r];
    const size_t half = rope.frequencies.size();
    float* angles = angles_[r].reserve(2 * half * tokens);
    each_token(tokens, [&](int64_t t, int) {
      const float position = float(step.positions[t]);
      for (size_t i = 0; i < half; ++i) {
        const Turn turn = turn_by(position * rope.frequencies[i]);
        angles[t * half + i] = rope.scale * turn.cosine;
        angles[(tokens + t) * half + i] = rope.scale * turn.sine;
      }
    });
  }
}

}  // namespace sterna
