// Runs small random models through the whole engine and prints a digest of every token and logprob: one line per model. The same lines must come out
// for every instruction set and on every architecture (tests/unit/executor/native/test_digest.py). With an argument: that instruction set only.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "kernels/dispatch.h"
#include "kernels/flush.h"
#include "pack/pack.h"

namespace sterna {
namespace {

constexpr int kHidden = 72, kHeads = 4, kKvHeads = 2, kHeadDim = 24, kIntermediate = 80, kVocab = 150, kLayers = 2;

// Numerical Recipes' linear congruential generator: the same numbers everywhere.
struct Random {
  uint32_t state;
  uint32_t bits() { return state = state * 1664525u + 1013904223u; }
  float uniform() { return float(bits() >> 8) / float(1 << 23) - 1.0f; }
};

struct Variant {
  const char* name;
  Format matrices, embed;
  QkNorm qk_norm;
  Activation activation;
  int window, experts;
  float softcap;
  bool post_norm;
};

// A model and the memory of its weights.
class RandomModel {
 public:
  RandomModel(const Variant& variant, uint32_t seed) : random_{seed} {
    Model& m = model;
    m.vocab_size = kVocab;
    m.hidden_size = kHidden;
    m.final_norm_eps = 1e-5f;
    m.logit_softcap = variant.softcap;
    m.embed = matrix(variant.embed, kVocab, kHidden, 1.0f);
    m.head = {m.embed, nullptr};
    m.final_norm = vector(kHidden, 1.0f);
    Rope rope;
    for (int i = 0; i < kHeadDim / 2; ++i) rope.frequencies.push_back(1.0f / float(1 << (i / 2)));
    m.ropes.push_back(rope);
    for (int i = 0; i < kLayers; ++i) m.layers.push_back(layer(variant));
  }

  Model model;

 private:
  Layer layer(const Variant& variant) {
    Layer layer;
    layer.norm_eps = 1e-5f;
    layer.attn_norm = vector(kHidden, 1.0f);
    layer.mlp_norm = vector(kHidden, 1.0f);
    if (variant.post_norm) {
      layer.attn_post_norm = vector(kHidden, 1.0f);
      layer.mlp_post_norm = vector(kHidden, 1.0f);
    }
    Attention& a = layer.attention;
    a.heads = kHeads;
    a.kv_heads = kKvHeads;
    a.head_dim = kHeadDim;
    a.scale = 1.0f / std::sqrt(float(kHeadDim));
    a.softcap = variant.softcap;
    a.window = variant.window;
    a.rope = 0;
    a.qk_norm = variant.qk_norm;
    if (a.qk_norm != QkNorm::kNone) {
      const bool per_head = a.qk_norm == QkNorm::kHead;
      a.q_norm = vector(per_head ? kHeadDim : kHeads * kHeadDim, 1.0f);
      a.k_norm = vector(per_head ? kHeadDim : kKvHeads * kHeadDim, 1.0f);
    }
    a.q = {matrix(variant.matrices, kHeads * kHeadDim, kHidden, 0.3f), vector(kHeads * kHeadDim, 0.0f)};
    a.k = {matrix(variant.matrices, kKvHeads * kHeadDim, kHidden, 0.3f), nullptr};
    a.v = {matrix(variant.matrices, kKvHeads * kHeadDim, kHidden, 0.3f), nullptr};
    a.o = {matrix(variant.matrices, kHidden, kHeads * kHeadDim, 0.3f), nullptr};
    if (variant.experts == 0) {
      layer.mlp = mlp(variant);
      return layer;
    }
    layer.mixture.top_k = 2;
    layer.mixture.router = matrix(variant.embed, variant.experts, kHidden, 0.3f);
    for (int e = 0; e < variant.experts; ++e) layer.mixture.experts.push_back(mlp(variant));
    return layer;
  }

  GatedMLP mlp(const Variant& variant) {
    GatedMLP mlp;
    mlp.intermediate = kIntermediate;
    mlp.activation = variant.activation;
    mlp.gate = {matrix(variant.matrices, kIntermediate, kHidden, 0.3f), nullptr};
    mlp.up = {matrix(variant.matrices, kIntermediate, kHidden, 0.3f), nullptr};
    mlp.down = {matrix(variant.matrices, kHidden, kIntermediate, 0.3f), nullptr};
    return mlp;
  }

  Matrix matrix(const Format& format, int rows, int cols, float size) {
    std::vector<float> values(size_t(rows) * cols);
    for (float& each : values) each = size * random_.uniform();
    Matrix m = layout_of(format, rows, cols);
    auto& memory = memory_.emplace_back(std::make_unique<Buffer<uint8_t>>());
    m.data = memory->reserve(m.bytes());
    if (pack_rows(source_type("F32"), m, reinterpret_cast<const uint8_t*>(values.data()), memory->get(), 1)) std::abort();
    return m;
  }

  const float* vector(int size, float center) {
    auto& values = vectors_.emplace_back(std::make_unique<std::vector<float>>(size));
    for (float& each : *values) each = center + 0.25f * random_.uniform();
    return values->data();
  }

  Random random_;
  std::vector<std::unique_ptr<Buffer<uint8_t>>> memory_;
  std::vector<std::unique_ptr<std::vector<float>>> vectors_;
};

uint64_t mix(uint64_t digest, const void* data, size_t size) {  // FNV-1a
  for (size_t i = 0; i < size; ++i) digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  return digest;
}

// Three requests: prompts of 300, 40 and 7 tokens in one step, the first's in two; then ten tokens each, the second sampled.
uint64_t run(const Model& model, const std::string& isa) {
  Engine engine(model, kernels_for(isa), {1024}, 2);
  Random random{5};
  const int lengths[] = {300, 40, 7}, first_page[] = {0, 30, 40};
  int computed[] = {0, 0, 0};
  for (int r = 0; r < 3; ++r) {
    SamplingOptions options;
    options.temperature = r == 1 ? 0.8f : 0.0f;
    options.seed = 17;
    options.top_logprobs = kVocab;
    options.logprob_ids = {kVocab - 1, 0, 75};
    engine.bind(r, options, nullptr, 0, nullptr, 0);
  }
  uint64_t digest = 14695981039346656037u;
  for (int number = 0; number < 12; ++number) {
    Step step;
    step.number = number;
    for (int r = 0; r < 3; ++r) {
      const int left = lengths[r] - computed[r];
      Row row;
      row.pool_index = r;
      row.first_token = int32_t(step.input_ids.size());
      row.prefix_len = computed[r];
      row.num_tokens = left > 0 ? std::min(left, 170) : 1;
      row.wants_sample = left <= 170;
      row.input_from = left > 0 ? -1 : r;
      row.pages.emplace_back();
      for (int p = 0; p * kPage < row.seq_len(); ++p) row.pages[0].push_back(first_page[r] + p);
      for (int t = 0; t < row.num_tokens; ++t) {
        step.input_ids.push_back(left > 0 ? int32_t(random.bits() >> 8) % kVocab : 0);
        step.positions.push_back(computed[r] + t);
      }
      computed[r] += row.num_tokens;
      step.rows.push_back(row);
    }
    engine.submit(step);
    for (const SampledToken& each : engine.wait(number).rows) {
      digest = mix(digest, &each.token, sizeof each.token);
      if (!each.logprobs) continue;
      const TokenLogprobs& told = *each.logprobs;
      digest = mix(digest, &told.chosen, sizeof told.chosen);
      digest = mix(digest, told.ids.data(), told.ids.size() * sizeof(int32_t));
      digest = mix(digest, told.values.data(), told.values.size() * sizeof(float));
      digest = mix(digest, told.of_ids.data(), told.of_ids.size() * sizeof(float));
    }
  }
  return digest;
}

}  // namespace
}  // namespace sterna

int main(int argc, char** argv) {
  using namespace sterna;
  const Format int4{Quant::kInt4, true, false, 32}, int8{Quant::kInt8, false, false, 32}, bf16{Quant::kBf16, false, false, 32};
  const Variant variants[] = {
      {"int4", int4, int8, QkNorm::kNone, Activation::kSilu, kNoWindow, 0, 0.0f, false},
      {"int8-window", int8, int8, QkNorm::kHead, Activation::kGeluTanh, 50, 0, 0.0f, true},
      {"bf16-softcap", bf16, bf16, QkNorm::kProjection, Activation::kGelu, kNoWindow, 0, 30.0f, false},
      {"mixture", int4, bf16, QkNorm::kNone, Activation::kSilu, kNoWindow, 5, 0.0f, false},
  };
  for (const std::string& isa : available_isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    uint32_t seed = 1;
    for (const Variant& variant : variants) {
      RandomModel random(variant, seed++);
      std::printf("%s %s %016llx\n", isa.c_str(), variant.name, static_cast<unsigned long long>(run(random.model, isa)));
    }
  }
  return 0;
}
