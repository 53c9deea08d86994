// Log-probabilities: log softmax of the model's own logits, before penalties, bias, mask, temperature and filters, which is what OpenAI's
// API and vLLM report by default.
#pragma once

#include "selection.h"

namespace sterna {

struct TokenLogprobs {
  float chosen = 0;
  std::vector<int32_t> ids;  // of the likeliest tokens, in descending order
  std::vector<float> values;
  std::vector<float> of_ids;  // of the ids that were asked for, in their order
};

// Stands for less, and for nothing at all (src/sterna/protocol/logprobs.py: LEAST_LOGPROB).
constexpr double kLeastLogprob = -9999;

class Logprobs {
 public:
  // `maximum` of logits[n]: finite.
  Logprobs(const Kernels& kernels, const float* logits, int n, float maximum);

  // At least kLeastLogprob.
  float of(float logit) const;
  // The k largest, the lowest id first among equals. Tokens of logit -inf are left out, so they may be fewer.
  void top(int k, TokenLogprobs& out, SamplerScratch& scratch) const;

 private:
  const Kernels& kernels_;
  const float* logits_;
  int n_;
  double maximum_;
  double log_sum_;  // ln of the sum of exp(logits - maximum)
};

}  // namespace sterna
