#include "sampler_state.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace sterna {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void require_tokens(const char* what, const int32_t* ids, size_t count, int vocab_size) {
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      const std::string token = std::string(what) + " token " + std::to_string(ids[i]);
      throw std::invalid_argument(token + " is not in a vocabulary of " + std::to_string(vocab_size));
    }
  }
}

// Whole words at a time: most are all zeros or all ones.
void mask_out(const uint32_t* words, float* logits, int vocab_size) {
  for (int first = 0; first < vocab_size; first += 32) {
    const uint32_t word = words[first / 32];
    if (word == 0xFFFFFFFF) continue;
    const int width = vocab_size - first < 32 ? vocab_size - first : 32;
    for (int i = 0; i < width; ++i) logits[first + i] = word >> i & 1 ? logits[first + i] : kNever;
  }
}

}  // namespace

RowState::RowState(int vocab_size, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len)
    : options_(options),
      penalised_(options.repetition != 1 || options.presence != 0 || options.frequency != 0),
      output_len_(int64_t(output_len)) {
  if (options.bias_ids.size() != options.bias_values.size()) throw std::invalid_argument("biases and their ids differ in number");
  require_tokens("bias", options.bias_ids.data(), options.bias_ids.size(), vocab_size);
  require_tokens("end", options.end_ids.data(), options.end_ids.size(), vocab_size);
  require_tokens("logprob", options.logprob_ids.data(), options.logprob_ids.size(), vocab_size);
  if (!penalised_) return;
  require_tokens("prompt", prompt, prompt_len, vocab_size);
  require_tokens("output", output, output_len, vocab_size);
  for (size_t i = 0; i < prompt_len; ++i) see(prompt[i]);
  for (size_t i = 0; i < output_len; ++i) ++see(output[i]).count;
}

void RowState::set_mask(const uint32_t* words, size_t count) {
  if (words == nullptr) {
    mask_.clear();
  } else {
    mask_.assign(words, words + count);
  }
}

bool RowState::edits() const { return penalised_ || !options_.bias_ids.empty() || holds_back_end() || !mask_.empty(); }

void RowState::edit(float* logits, int vocab_size) const {
  for (const Seen& each : seen_) {
    float value = logits[each.token];
    value = value > 0 ? value / options_.repetition : value * options_.repetition;
    if (each.count > 0) {
      value -= options_.presence;
      value -= options_.frequency * float(each.count);
    }
    logits[each.token] = value;
  }
  for (size_t i = 0; i < options_.bias_ids.size(); ++i) logits[options_.bias_ids[i]] += options_.bias_values[i];
  if (holds_back_end()) {
    for (int32_t token : options_.end_ids) logits[token] = kNever;
  }
  if (!mask_.empty()) mask_out(mask_.data(), logits, vocab_size);
}

void RowState::append(int32_t token) {
  ++output_len_;
  if (penalised_) ++see(token).count;
}

RowState::Seen& RowState::see(int32_t token) {
  const auto [found, is_new] = seen_at_.try_emplace(token, seen_.size());
  if (is_new) seen_.push_back({token, 0});
  return seen_[found->second];
}

}  // namespace sterna
