#include "filters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace sterna {
namespace {

constexpr int kFewBlocks = 1024;  // whose values are worth a look one by one
constexpr int kFewValues = 256;
constexpr int kHalvings = 16;  // enough to tell apart all but nearly equal logits

void to_z(const Logits& logits, std::vector<float>& values) {
  for (float& value : values) value = logits.z(value);
}

double sum_exp(const std::vector<float>& z) {
  double sum = 0;
  for (float each : z) sum += std::exp(double(each));
  return sum;
}

// With top_p among those that top_k keeps.
float top_k_floor(const Kernels& kernels, const SamplingOptions& options, const Logits& logits, SamplerScratch& scratch) {
  std::vector<float>& values = scratch.values;
  const float bound = lower_bound_of_kth(logits.x, logits.n, options.top_k, values), all = std::numeric_limits<float>::infinity();
  collect(kernels, logits.x, logits.n, bound, all, scratch);
  std::nth_element(values.begin(), values.begin() + (options.top_k - 1), values.end(), std::greater<float>());
  const float floor = logits.z(values[size_t(options.top_k - 1)]);
  if (!(options.top_p < 1)) return floor;
  collect(kernels, logits.x, logits.n, logits.cut(floor), all, scratch);  // again: logits below the bound may round to the same z
  to_z(logits, values);
  values.erase(std::remove_if(values.begin(), values.end(), [floor](float z) { return z < floor; }), values.end());
  return nucleus_floor(values, double(options.top_p) * sum_exp(values));
}

// Where subnormal numbers count as zero (flush.h), the next number above zero is the smallest normal one.
float just_above(float logit) {
  const float next = std::nextafter(logit, std::numeric_limits<float>::infinity());
  return logit < next ? next : std::numeric_limits<float>::min();
}

// A logit, and what lies at or above it.
struct Level {
  float logit;
  Mass mass;
};

// Where a nucleus ends: wanted, a part of the row's mass, is reached by the tokens at or above the floor and not by those above it.
class Nucleus {
 public:
  Nucleus(const Kernels& kernels, const Logits& logits, float top_p, SamplerScratch& scratch)
      : kernels_(kernels), logits_(logits), scratch_(scratch), factor_(std::min(1 / logits.temperature, std::numeric_limits<float>::max())) {
    const double mass = level(-std::numeric_limits<float>::infinity()).mass.sum;
    wanted_ = mass * top_p;
    // All that lies deeper has less than the rest of the mass together, or can't win.
    deepest_ = float(std::max(std::log((mass - wanted_) / logits.n) - 0.01, double(kNoHope)));
    above_ = {just_above(logits.largest), {0, 0}};
  }

  float floor() {
    for (float depth : {-5.0f, -9.0f, deepest_}) {  // most end above the first
      const float start = std::max(depth, deepest_), cut = logits_.cut(start);
      scratch_.num_blocks = kernels_.blocks_at_least(logits_.x, logits_.n, cut, scratch_.blocks.data());
      const Level low = scratch_.num_blocks > kFewBlocks ? level(cut) : summed(cut);
      if (low.mass.sum >= wanted_) return floor_above(low);
      above_ = low;
      if (start == deepest_) break;
    }
    return deepest_;  // only rounding has kept the sum below what is wanted, or what lies deeper can't win
  }

 private:
  Level level(float logit) const { return {logit, kernels_.mass_at_least(logits_.x, logits_.n, logits_.largest, factor_, logit)}; }

  // The same from scratch.blocks, by what lies below `above_`; leaves their z in scratch.values.
  Level summed(float logit) {
    take_values(logits_.x, logits_.n, logit, above_.logit, scratch_);
    to_z(logits_, scratch_.values);
    return {logit, {above_.mass.sum + sum_exp(scratch_.values), above_.mass.count + int32_t(scratch_.values.size())}};
  }

  float floor_above(Level low) {
    if (scratch_.num_blocks > kFewBlocks) {
      for (int i = 0; i < kHalvings && low.mass.count - above_.mass.count > kFewValues; ++i) {
        const Level middle = level(float((double(low.logit) + double(above_.logit)) / 2));
        (middle.mass.sum < wanted_ ? above_ : low) = middle;
      }
      collect(kernels_, logits_.x, logits_.n, low.logit, above_.logit, scratch_);
      to_z(logits_, scratch_.values);
    }
    return nucleus_floor(scratch_.values, wanted_ - above_.mass.sum);
  }

  const Kernels& kernels_;
  const Logits& logits_;
  SamplerScratch& scratch_;
  const float factor_;
  double wanted_;
  float deepest_;
  Level above_;  // too few: the floor is below
};

}  // namespace

float Logits::cut(float floor) const {
  const double exact = double(largest) + double(floor) * double(temperature) * (1 + 1e-6);
  return std::nextafter(float(std::max(exact, -double(std::numeric_limits<float>::max()))), -std::numeric_limits<float>::infinity());
}

float filter_floor(const Kernels& kernels, const SamplingOptions& options, const Logits& logits, SamplerScratch& scratch) {
  float floor = kNoHope;
  if (options.min_p > 0) floor = std::min(std::max(floor, float(std::log(double(options.min_p)))), 0.0f);
  if (options.top_k > 0 && options.top_k < logits.n) return std::max(floor, top_k_floor(kernels, options, logits, scratch));
  if (options.top_p < 1) return std::max(floor, Nucleus(kernels, logits, options.top_p, scratch).floor());
  return floor;
}

}  // namespace sterna
