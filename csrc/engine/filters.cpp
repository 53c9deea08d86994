#include "filters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace sterna {
namespace {

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
  collect(kernels, logits.x, logits.n, lower_bound_of_kth(logits.x, logits.n, options.top_k, values), scratch);
  std::nth_element(values.begin(), values.begin() + (options.top_k - 1), values.end(), std::greater<float>());
  const float floor = logits.z(values[size_t(options.top_k - 1)]);
  if (!(options.top_p < 1)) return floor;
  to_z(logits, values);
  values.erase(std::remove_if(values.begin(), values.end(), [floor](float z) { return z < floor; }), values.end());
  return nucleus_floor(values, double(options.top_p) * sum_exp(values));
}

// The sum of exp(z) over the whole row.
double mass_of(const Kernels& kernels, const Logits& logits, std::vector<float>& z) {
  if (logits.temperature == 1) return kernels.exp_sum(logits.x, logits.n, logits.largest);
  const float factor = 1 / logits.temperature;
  for (int i = 0; i < logits.n; ++i) z[size_t(i)] = (logits.x[i] - logits.largest) * factor;
  return kernels.exp_sum(z.data(), logits.n, 0);
}

float top_p_floor(const Kernels& kernels, const SamplingOptions& options, const Logits& logits, SamplerScratch& scratch) {
  const double mass = mass_of(kernels, logits, scratch.z), wanted = mass * options.top_p;
  // All that lies deeper than this has less than the rest of the mass together.
  const double deepest = std::max(std::log((mass - wanted) / logits.n) - 0.01, double(kNoHope));
  for (double depth : {-5.0, -9.0, deepest}) {
    const float start = float(std::max(depth, deepest));
    collect(kernels, logits.x, logits.n, logits.cut(start), scratch);
    to_z(logits, scratch.values);
    if (sum_exp(scratch.values) >= wanted) return nucleus_floor(scratch.values, wanted);
    if (depth <= deepest) break;
  }
  return float(deepest);  // only rounding has kept the sum below what is wanted, or what lies deeper can't win
}

}  // namespace

float Logits::cut(float floor) const {
  const double exact = double(largest) + double(floor) * double(temperature) * (1 + 1e-6);
  return std::nextafter(float(std::max(exact, -double(std::numeric_limits<float>::max()))), -std::numeric_limits<float>::infinity());
}

Floor filter_floor(const Kernels& kernels, const SamplingOptions& options, const Logits& logits, SamplerScratch& scratch) {
  float floor = kNoHope;
  if (options.min_p > 0) floor = std::min(std::max(floor, float(std::log(double(options.min_p)))), 0.0f);
  if (options.top_k > 0 && options.top_k < logits.n) return {std::max(floor, top_k_floor(kernels, options, logits, scratch)), true};
  if (options.top_p < 1) return {std::max(floor, top_p_floor(kernels, options, logits, scratch)), true};
  return {floor, false};
}

}  // namespace sterna
