// A mixture of experts: each token's rows go to its experts, sorted by expert so that each expert's matrices are read once.
#include <algorithm>
#include <cmath>

#include "forward.h"

namespace sterna {

// Fills choices_ and expert_rows_ from the router's logits. softmax over all experts is monotonic, so the likeliest have the largest logits.
void Forward::route(const Mixture& mixture, int tokens) {
  const int experts = int(mixture.experts.size()), top_k = mixture.top_k;
  const size_t stride = size_t(mixture.router.padded_rows());
  choices_.assign(size_t(tokens) * top_k, {});
  each_token(tokens, [&](int64_t t, int) {
    float* logits = router_.get() + t * stride;
    const Maximum largest = kernels_.maximum(logits, experts);
    const double total = kernels_.exp_sum(logits, experts, largest.value);
    float chosen_total = 0.0f;
    for (int c = 0; c < top_k; ++c) {
      const Maximum next = kernels_.maximum(logits, experts);
      // Its own share of `total`, by the same exp.
      const float weight = float(kernels_.exp_sum(&next.value, 1, largest.value) / total);
      logits[next.index] = -INFINITY;
      choices_[t * top_k + c] = {next.index, weight, 0};  // the expert, until places are known
      chosen_total += weight;
    }
    if (!mixture.normalize) return;
    for (int c = 0; c < top_k; ++c) choices_[t * top_k + c].weight /= chosen_total;
  });
  expert_rows_.assign(experts + 1, 0);
  for (const Choice& choice : choices_) ++expert_rows_[choice.token + 1];
  for (int e = 0; e < experts; ++e) expert_rows_[e + 1] += expert_rows_[e];
  std::vector<int32_t> next(expert_rows_.begin(), expert_rows_.end() - 1);
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    choice.place = next[choice.token]++;
    choice.token = int32_t(i) / top_k;
  }
}

void Forward::mixture(const Layer& layer, int tokens) {
  const Mixture& mixture = layer.mixture;
  const GatedMLP& shape = mixture.experts[0];
  const int hidden = model_.hidden_size, rows = tokens * mixture.top_k, experts = int(mixture.experts.size());
  const Linear router{mixture.router, nullptr};
  const size_t router_stride = size_t(router.weight.padded_rows());
  products({{&router, &hidden_inputs_, router_.reserve(router_stride * tokens), router_stride}}, tokens);
  route(mixture, tokens);

  expert_inputs_.reserve(rows, hidden, Rounding::kRefined, {&shape.gate.weight, &shape.up.weight});
  each_token(rows, [&](int64_t i, int) { expert_inputs_.copy(choices_[i].place, hidden_inputs_, choices_[i].token); });

  struct Item {
    int32_t expert, first_row, rows, block, blocks;
  };
  std::vector<Item> items;
  auto deal = [&](int blocks, int per_item, int tile) {
    items.clear();
    for (int e = 0; e < experts; ++e)
      for (int row = expert_rows_[e]; row < expert_rows_[e + 1]; row += tile)
        for (int b = 0; b < blocks; b += per_item)
          items.push_back({e, row, std::min(tile, expert_rows_[e + 1] - row), b, std::min(per_item, blocks - b)});
  };
  const size_t stride = size_t(shape.down.weight.padded_rows());
  inputs_.reserve(rows, shape.intermediate, Rounding::kPlain, {&shape.down.weight});
  deal(shape.gate.weight.blocks(), 4, 64);
  threads_.each(int64_t(items.size()), [&](int64_t i, int thread) {
    const Item& item = items[i];
    gated(mixture.experts[item.expert], expert_inputs_, item.first_row, item.rows, item.block, item.blocks, inputs_, thread);
  });
  float* out = expert_out_.reserve(stride * rows);
  deal(shape.down.weight.blocks(), 8, 128);
  threads_.each(int64_t(items.size()), [&](int64_t i, int thread) {
    const Item& item = items[i];
    const Matrix& w = mixture.experts[item.expert].down.weight;
    kernels_.matmul(w, inputs_.view(w), item.first_row, item.rows, item.block, item.blocks, out, stride, scratch_[thread].ahead);
  });
  y_.reserve(size_t(tokens) * hidden);
  each_token(tokens, [&](int64_t t, int) {
    float* y = y_.get() + t * hidden;
    std::fill_n(y, hidden, 0.0f);
    for (int c = 0; c < mixture.top_k; ++c) {
      const Choice& choice = choices_[t * mixture.top_k + c];
      kernels_.add_scaled(y, out + choice.place * stride, choice.weight, hidden);
    }
    add_residual(layer, layer.mlp_post_norm, y, x_.get() + t * hidden);
  });
}

}  // namespace sterna
