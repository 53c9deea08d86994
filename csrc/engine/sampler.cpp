#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "filters.h"

namespace sterna {
namespace {

constexpr int kFirstPiece = 16, kLargestPiece = 256;  // blocks that race together

// The definition: logarithms in double, rounded once.
float noise_of(uint32_t word) {
  const double u = (double(word >> 8) + 0.5) * 0x1p-24;
  return float(-std::log(-std::log(u)));
}

// The best candidate so far, and what another must have to beat it.
class Leader {
 public:
  Leader(const Logits& logits, const PhiloxStream& stream, float floor, int32_t likeliest) : logits_(logits), floor_(floor), token_(likeliest) {
    uint32_t words[4];
    philox_block(stream, uint32_t(likeliest) / 4, words);
    score_ = noise_of(words[likeliest % 4]);  // its z is 0
    race_ = {stream, logits.largest, float(std::min(0x1p23 * kLog2E / double(logits.temperature), 1e30)), 0};
  }

  int32_t token() const { return token_; }
  // No z below this can win.
  float hopeful() const { return std::max(floor_, score_ - kNoiseMax - 0.001f); }

  const Race& race() {
    race_.offset = float(0x1p23 * (127 + 24 + (kMargin - double(score_)) * kLog2E));
    return race_;
  }

  void meet(const Contender& other) {
    const float z = logits_.z(logits_.x[other.token]);
    if (z < floor_) return;
    const float score = z + noise_of(other.word);
    if (score > score_ || (score == score_ && other.token < token_)) {
      score_ = score;
      token_ = other.token;
    }
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr double kMargin = 1e-3;  // the float32 roundings of a bound and of two scores come to less than 1e-4

  const Logits& logits_;
  const float floor_;
  int32_t token_;
  float score_;
  Race race_;
};

}  // namespace

Sampler::Sampler(int vocab_size, const Kernels& kernels) : vocab_size_(vocab_size), kernels_(kernels) {
  if (vocab_size < 1) throw std::invalid_argument("a vocabulary of " + std::to_string(vocab_size) + " tokens");
}

void Sampler::bind(int row, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len) {
  if (row < 0) throw std::invalid_argument("row " + std::to_string(row));
  if (is_bound(row)) throw std::invalid_argument("row " + std::to_string(row) + " is bound");
  auto state = std::make_unique<RowState>(vocab_size_, options, prompt, prompt_len, output, output_len);
  if (size_t(row) >= rows_.size()) rows_.resize(size_t(row) + 1);
  rows_[size_t(row)] = std::move(state);
}

void Sampler::release(int row) {
  if (is_bound(row)) rows_[size_t(row)].reset();
}

void Sampler::set_mask(int row, const uint32_t* mask, size_t words) {
  if (!is_bound(row)) throw std::invalid_argument("row " + std::to_string(row) + " isn't bound");
  if (mask != nullptr && words != size_t(vocab_size_ + 31) / 32) {
    throw std::invalid_argument("a mask of " + std::to_string(words) + " words for " + std::to_string(vocab_size_) + " tokens");
  }
  rows_[size_t(row)]->set_mask(mask, words);
}

SampledToken Sampler::sample(int row, float* logits, SamplerScratch& scratch) {
  RowState& state = *rows_[size_t(row)];
  scratch.reserve(vocab_size_, 4 * kLargestPiece);
  SampledToken sampled;
  const int top = state.options().top_logprobs;
  Maximum largest = kernels_.maximum(logits, vocab_size_);
  sampled.nan = largest.has_nan || !std::isfinite(largest.value);
  if (sampled.nan) return sampled;
  const bool edits = state.edits();
  std::optional<Logprobs> logprobs;
  const float* raw = logits;
  if (top >= 0) {
    if (edits) {
      scratch.raw.assign(logits, logits + vocab_size_);
      raw = scratch.raw.data();
    }
    logprobs.emplace(kernels_, raw, vocab_size_, largest.value);
  }
  if (edits) {
    state.edit(logits, vocab_size_);
    largest = kernels_.maximum(logits, vocab_size_);
    sampled.nan = largest.has_nan || !std::isfinite(largest.value);
    if (sampled.nan) return sampled;
  }
  sampled.token = state.options().temperature > 0 ? draw(state, logits, largest, scratch) : largest.index;
  if (logprobs) {
    TokenLogprobs& told = sampled.logprobs.emplace();
    told.chosen = logprobs->of(raw[sampled.token]);
    logprobs->top(top, told, scratch);
    for (int32_t id : state.options().logprob_ids) told.of_ids.push_back(logprobs->of(raw[id]));
  }
  state.append(sampled.token);
  return sampled;
}

int32_t Sampler::draw(const RowState& row, const float* logits, const Maximum& largest, SamplerScratch& scratch) const {
  const SamplingOptions& options = row.options();
  const Logits candidates{logits, vocab_size_, largest.value, options.temperature};
  const float floor = filter_floor(kernels_, options, candidates, scratch);
  const PhiloxStream stream{{uint32_t(options.seed), uint32_t(options.seed >> 32)}, row.output_index()};
  Leader leader(candidates, stream, floor, largest.index);
  scratch.num_blocks = kernels_.blocks_at_least(logits, vocab_size_, candidates.cut(leader.hopeful()), scratch.blocks.data());
  // The better the leader, the fewer contend with it: small pieces first, while it is young.
  int piece = kFirstPiece;
  for (int first = 0; first < scratch.num_blocks; piece = std::min(2 * piece, kLargestPiece)) {
    const int count = std::min(piece, scratch.num_blocks - first);
    const int found = kernels_.race(leader.race(), logits, vocab_size_, scratch.blocks.data() + first, count, scratch.contenders.data());
    for (int i = 0; i < found; ++i) leader.meet(scratch.contenders[size_t(i)]);
    first += count;
  }
  return leader.token();
}

}  // namespace sterna
