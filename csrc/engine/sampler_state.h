// What the sampler knows of one row between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sterna {

// One request's wishes, validated before (protocol/sampling.py; src/sterna/executor/native/sampling.py translates).
struct SamplingOptions {
  float temperature = 1;  // 0 is greedy
  int32_t top_k = 0;      // <= 0: off
  float top_p = 1;        // in (0, 1]
  float min_p = 0;        // in [0, 1]
  float repetition = 1;   // > 0
  float presence = 0;
  float frequency = 0;
  uint64_t seed = 0;
  int32_t min_new_tokens = 0;
  std::vector<int32_t> end_ids;  // may not come before output token `min_new_tokens`
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  int32_t top_logprobs = -1;  // -1: no logprobs, 0: the chosen token's, k: those of the k likeliest tokens too
  std::vector<int32_t> logprob_ids;  // whose logprobs come with them
};

class RowState {
 public:
  // Throws std::invalid_argument for an id outside the vocabulary, or biases and their ids that differ in number.
  RowState(int vocab_size, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len);

  const SamplingOptions& options() const { return options_; }
  uint32_t output_index() const { return uint32_t(output_len_); }  // of the next token
  void set_mask(const uint32_t* words, size_t count);  // nullptr: none

  // Whether `edit` would change anything now.
  bool edits() const;
  // Penalties, bias, end tokens, mask: in this order, all in float32.
  void edit(float* logits, int vocab_size) const;
  void append(int32_t token);

 private:
  struct Seen {
    int32_t token;
    int32_t count;  // in the output
  };

  bool holds_back_end() const { return output_len_ < options_.min_new_tokens && !options_.end_ids.empty(); }
  Seen& see(int32_t token);

  SamplingOptions options_;
  bool penalised_;
  int64_t output_len_;
  std::vector<Seen> seen_;  // tokens of prompt and output, where there are penalties
  std::unordered_map<int32_t, size_t> seen_at_;
  std::vector<uint32_t> mask_;
};

}  // namespace sterna
