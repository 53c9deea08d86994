// Logits to token ids: the torch executor's sampler (executor/torch/sampler.py has the order of the filters), token for token.
//
// A row whose logits hold a NaN or +inf, masked or not, or that has no token left whose logit isn't -inf (a mask may forbid all), gives `nan` and no
// token, and its state stays as it was. Tokens of logit -inf are never drawn. Callers compute inside a `FlushSubnormals` scope.
//
// Time: a greedy row costs a pass over the logits; a random one another, and random numbers (no logarithms) for the tokens whose logits aren't hopeless.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels/kernels.h"
#include "logprobs.h"
#include "sampler_state.h"
#include "selection.h"

namespace sterna {

struct SampledToken {
  int32_t token = -1;
  bool nan = false;
  std::optional<TokenLogprobs> logprobs;  // of a token whose row asks for them
};

class Sampler {
 public:
  // Throws std::invalid_argument for a vocabulary without tokens. `kernels` must outlive this.
  Sampler(int vocab_size, const Kernels& kernels);
  Sampler(const Sampler&) = delete;

  // The next token of `row` is output token `output_len`: a row bound with its output so far goes on as if it had never been released.
  // Throws std::invalid_argument where the row is bound, or for what RowState refuses; the row is then as before.
  void bind(int row, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len);
  void release(int row);  // idempotent
  bool is_bound(int row) const { return row >= 0 && size_t(row) < rows_.size() && rows_[size_t(row)] != nullptr; }

  // Bit t % 32 of word t / 32: token t is allowed; the others count as -inf. Copied; stays until changed or released; nullptr takes it off.
  // Throws std::invalid_argument where the row isn't bound or `words` isn't ceil(vocab / 32).
  void set_mask(int row, const uint32_t* mask, size_t words);

  // The next token of a bound row from logits [vocab], which are overwritten; the token counts as output from here on. Different rows may be
  // sampled by different threads at once, each with a scratch of its own, while nobody binds, releases or sets masks.
  SampledToken sample(int row, float* logits, SamplerScratch& scratch);

 private:
  int32_t draw(const RowState& row, const float* logits, const Maximum& largest, SamplerScratch& scratch) const;

  const int vocab_size_;
  const Kernels& kernels_;
  std::vector<std::unique_ptr<RowState>> rows_;
};

}  // namespace sterna
