#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sterna {

Logprobs::Logprobs(const Kernels& kernels, const float* logits, int n, float maximum)
    : kernels_(kernels), logits_(logits), n_(n), maximum_(maximum), log_sum_(std::log(kernels.exp_sum(logits, n, maximum))) {}

float Logprobs::of(float logit) const {
  return float(std::max(double(logit) - maximum_ - log_sum_, kLeastLogprob));
}

void Logprobs::top(int k, TokenLogprobs& out, SamplerScratch& scratch) const {
  std::vector<int32_t>& ids = out.ids;
  k = std::min(k, n_);
  if (k <= 0) return;
  const float bound = lower_bound_of_kth(logits_, n_, k, scratch.values);
  const float cut = std::max(bound, -std::numeric_limits<float>::max());
  const int blocks = kernels_.blocks_at_least(logits_, n_, cut, scratch.blocks.data());
  for (int b = 0; b < blocks; ++b) {
    const int first = 4 * scratch.blocks[size_t(b)], last = std::min(first + 4, n_);
    for (int i = first; i < last; ++i) {
      if (logits_[i] >= cut) ids.push_back(i);
    }
  }
  const auto kept = ids.begin() + std::min(ids.size(), size_t(k));
  std::partial_sort(ids.begin(), kept, ids.end(),
                    [this](int32_t a, int32_t b) { return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b; });
  ids.erase(kept, ids.end());
  for (int32_t id : ids) out.values.push_back(of(logits_[id]));
}

}  // namespace sterna
