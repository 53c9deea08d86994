// A model's layers over a step's tokens: loops over tokens, over blocks of matrices, over attention's tiles, one after another.
#pragma once

#include <atomic>
#include <functional>
#include <stdexcept>
#include <vector>

#include "attention_plan.h"
#include "inputs.h"
#include "kv_pool.h"
#include "model.h"
#include "step.h"
#include "threads.h"

namespace sterna {

// A step that was not finished, because the engine ends.
struct Abandoned : std::runtime_error {
  Abandoned() : std::runtime_error("the engine has been shut down") {}
};

class Forward {
 public:
  // All of them outlive it.
  Forward(const Model& model, const Kernels& kernels, KVPool& pool, ThreadPool& threads);

  // Run a step, writing its tokens' keys and values into the pool, and give the logits (vocab_size,) of each row that wants a sample to
  // `sink(row, logits, thread)`, which may overwrite them; sinks of different rows run at once. Within a FlushSubnormals scope.
  using Sink = std::function<void(int row, float* logits, int thread)>;
  void run(const Step& step, const Sink& sink);
  // For when there is nothing to run: has a little of the memory for the keys and values to come, in milliseconds. False where all of the lead is there.
  bool touch_ahead() noexcept;
  // From any thread: a `run` throws Abandoned before its next layer, and so does every one from now on.
  void abandon() { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  // One matrix product of a loop: rows of `y` are `stride` floats apart.
  struct Product {
    const Linear* linear;
    const Inputs* inputs;
    float* y;
    size_t stride;
  };
  struct alignas(64) Scratch {  // of one thread
    Buffer<float> gate, up;
    Buffer<uint16_t> queries;
    Buffer<int32_t> positions;
    Buffer<float> state, next;  // attention partials
    std::vector<const uint8_t*> pages;
    Ahead ahead;  // keys and values of the next attention
  };

  void reserve(const Step& step);
  void rope_angles(const Step& step);
  void touch_pages(const Step& step);
  void touch_pieces();
  size_t pieces_at_once() const;
  void copy_pages(const Step& step);
  void plan(const Step& step);
  void ask_for_keys(int layer);
  void embed(const Step& step);
  void attend(const Step& step, int layer);
  void keys_and_queries(const Layer& layer, int index, int token, const Row& row);
  void attend_shared(const Step& step, const Layer& layer, int index, const AttentionPlan& plan);
  void attend_tile(const Step& step, const Layer& layer, int index, const AttentionPlan& plan, const TokenTile& tile, int head, int thread);
  Span span_of(const Row& row, const Attention& a, int layer, int span, int end, int head, Scratch& scratch) const;
  Partial partial(Buffer<float>& memory, int count, int dim) const;
  void keep_sampled(const Step& step);
  void mlp(const Layer& layer, int tokens);
  void mixture(const Layer& layer, int tokens);
  void route(const Mixture& mixture, int tokens);
  void gated(const GatedMLP& mlp, const Inputs& inputs, int first_row, int rows, int first_block, int blocks, Inputs& to, int thread);
  void head(const Sink& sink);

  // x += residual_scale * post_norm(y), for one token.
  void add_residual(const Layer& layer, const float* post_norm, float* y, float* x) const;
  void products(const std::vector<Product>& all, int rows);
  // body(token, thread); a few tokens are not worth waking anyone for.
  template <class Body>
  void each_token(int tokens, const Body& body) {
    if (tokens >= 4) return threads_.each(tokens, body);
    for (int i = 0; i < tokens; ++i) body(i, 0);
  }

  const Model& model_;
  const Kernels& kernels_;
  KVPool& pool_;
  ThreadPool& threads_;
  std::atomic<bool> abandoned_{false};

  std::vector<AttentionPlan> plans_;  // of this step, one for all layers whose attention has the same KV group, window and shape
  std::vector<int> plan_of_layer_;
  std::vector<int> plan_layer_;  // the first layer that each plan is for
  std::vector<std::vector<int32_t>> read_pages_;  // per plan: the pages that the step's rows read, each once, as many as are asked for ahead
  std::vector<uint8_t> seen_pages_;
  std::vector<KVPool::Piece> pieces_;

  std::vector<int32_t> row_of_token_;
  std::vector<int32_t> sampled_;  // rows of the step that want a sample
  Buffer<float> x_, qkv_, mixed_, y_, logits_, partials_;
  Buffer<uint16_t> queries_;
  std::vector<Buffer<float>> angles_;  // per rope: [token][half] cosines and then [token][half] sines
  Inputs inputs_, hidden_inputs_, expert_inputs_;
  std::vector<Scratch> scratch_;

  // Of a mixture: one token's choice of one expert. Rows of the expert's inputs are sorted by expert.
  struct Choice {
    int32_t token;
    float weight;
    int32_t place;  // its row among those of all experts
  };
  std::vector<Choice> choices_;           // [token][top_k]
  std::vector<int32_t> expert_rows_;      // [experts + 1]: where each expert's rows begin
  Buffer<float> router_, expert_out_;
};

}  // namespace sterna
