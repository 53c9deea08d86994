// A model as the forward runs it: `models/spec.py` with its weights in place. Filled by the bindings, which check every shape.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace sterna {

// A matrix and, where there is one, its bias [rows].
struct Linear {
  Matrix weight;
  const float* bias = nullptr;
};

// Rotary embedding: pair i at position p is turned by float(p) * frequencies[i], with cosine and sine multiplied by `scale`.
struct Rope {
  std::vector<float> frequencies;
  float scale = 1.0f;
};

enum class QkNorm : uint8_t { kNone = 0, kHead = 1, kProjection = 2 };

struct Attention {
  int heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;   // 0 for none
  int window = kNoWindow;
  int rope = -1;          // index into Model::ropes, -1 for none
  int kv_group = 0;
  QkNorm qk_norm = QkNorm::kNone;
  Linear q, k, v, o;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
};

struct GatedMLP {
  int intermediate = 0;
  Activation activation = Activation::kSilu;
  Linear gate, up, down;
};

struct Mixture {
  int top_k = 0;
  bool normalize = true;
  Matrix router;
  std::vector<GatedMLP> experts;  // all of one shape and activation
};

struct Layer {
  Attention attention;
  GatedMLP mlp;     // where there are no experts
  Mixture mixture;
  float norm_eps = 0.0f;
  float residual_scale = 1.0f;
  // Each [hidden], or null where there is no such norm.
  const float* attn_norm = nullptr;
  const float* attn_post_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* mlp_post_norm = nullptr;

  bool is_mixture() const { return !mixture.experts.empty(); }
};

struct Model {
  int vocab_size = 0, hidden_size = 0;
  float embed_scale = 1.0f, logit_scale = 1.0f, logit_softcap = 0.0f, final_norm_eps = 0.0f;
  Matrix embed;
  Linear head;
  const float* final_norm = nullptr;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  int kv_groups = 1;
};

}  // namespace sterna
