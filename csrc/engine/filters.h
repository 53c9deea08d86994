// top_k, top_p, min_p: a threshold on z = (logit - largest) / temperature.
#pragma once

#include "sampler_state.h"
#include "selection.h"

namespace sterna {

// The noise lies in [kNoiseMin, kNoiseMax] (executor/philox.py), so a z (at most 0) below kNoHope can't win: the likeliest token's worst noise
// beats it. The margin is for float32 rounding.
constexpr float kNoiseMin = -2.8523629f, kNoiseMax = 17.328680f, kNoHope = kNoiseMin - kNoiseMax - 0.001f;

struct Logits {
  const float* x;
  int n;
  float largest;  // finite
  float temperature;

  float z(float logit) const { return (logit - largest) / temperature; }
  // A logit that all whose z is at least `floor` reach, and few others.
  float cut(float floor) const;
};

// The smallest z that the filters keep, between kNoHope and 0: each keeps or drops equal z together (executor/torch/sampler.py).
float filter_floor(const Kernels& kernels, const SamplingOptions& options, const Logits& logits, SamplerScratch& scratch);

}  // namespace sterna
