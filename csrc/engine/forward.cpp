#include "forward.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <unistd.h>

namespace sterna {
namespace {

// Activations of so many bytes stay in a core's own cache while blocks of weights pass by.
constexpr size_t kTileBytes = 256 << 10;
constexpr int kGatedTileRows = 64;
// Rows whose logits are held at once.
constexpr int kLogitRows = 32;
// Pieces of memory touched side by side: whoever gives them may share them out, and a step that arrives meanwhile waits for all of them.
constexpr int kMostPiecesAtOnce = 8;
// Items per thread and loop: enough to even out, few enough not to be felt.
constexpr int kItemsPerThread = 8;

int tile_rows(size_t stride, int rows) {
  const int fit = int(std::max<size_t>(32, kTileBytes / stride / 16 * 16));
  return std::min(rows, fit);
}

int blocks_per_item(int blocks, int threads, int tiles) {
  const int wanted = blocks * tiles / (threads * kItemsPerThread);
  return std::min(std::max(2, wanted / 2 * 2), 16);
}

// Of keys and values so much is asked for before they are read: half of the cache that the cores share, where the system knows it.
size_t ahead_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const long shared = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (shared > 0) return size_t(shared) / 2;
#endif
  return 4 << 20;
}

size_t padded(const Linear& linear) { return size_t(linear.weight.padded_rows()); }

}  // namespace

Forward::Forward(const Model& model, const Kernels& kernels, KVPool& pool, ThreadPool& threads)
    : model_(model), kernels_(kernels), pool_(pool), threads_(threads), angles_(model.ropes.size()), scratch_(threads.size()) {
  pieces_.reserve(kMostPiecesAtOnce);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Attention& a = model.layers[i].attention;
    auto same = [&](int other) {
      const Attention& b = model.layers[other].attention;
      return a.kv_group == b.kv_group && a.window == b.window && a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim;
    };
    const auto found = std::find_if(plan_layer_.begin(), plan_layer_.end(), same);
    plan_of_layer_.push_back(int(found - plan_layer_.begin()));
    if (found == plan_layer_.end()) plan_layer_.push_back(int(i));
  }
}

void Forward::run(const Step& step, const Sink& sink) {
  ThreadPool::Awake awake(threads_);
  reserve(step);
  touch_pages(step);
  copy_pages(step);
  rope_angles(step);
  plan(step);
  ask_for_keys(0);
  embed(step);
  const int hidden = model_.hidden_size;
  int tokens = int(step.input_ids.size());
  for (size_t i = 0; i < model_.layers.size(); ++i) {
    const Layer& layer = model_.layers[i];
    if (abandoned_.load(std::memory_order_relaxed)) throw Abandoned();
    attend(step, int(i));
    ask_for_keys(int(i) + 1);
    if (i + 1 == model_.layers.size()) {
      keep_sampled(step);
      tokens = int(sampled_.size());
      if (tokens == 0) return;
    }
    const size_t mixed_cols = size_t(layer.attention.heads) * layer.attention.head_dim;
    inputs_.reserve(tokens, int(mixed_cols), Rounding::kPlain, {&layer.attention.o.weight});
    each_token(tokens, [&](int64_t t, int) { inputs_.set(kernels_, int(t), mixed_.get() + t * mixed_cols); });
    const size_t stride = padded(layer.attention.o);
    products({{&layer.attention.o, &inputs_, y_.reserve(stride * tokens), stride}}, tokens);
    const GatedMLP& reader = layer.is_mixture() ? layer.mixture.experts[0] : layer.mlp;
    if (layer.is_mixture())
      hidden_inputs_.reserve(tokens, hidden, Rounding::kRefined, {&layer.mixture.router, &reader.gate.weight, &reader.up.weight});
    else
      hidden_inputs_.reserve(tokens, hidden, Rounding::kRefined, {&reader.gate.weight, &reader.up.weight});
    each_token(tokens, [&](int64_t t, int thread) {
      float* x = x_.get() + t * hidden;
      add_residual(layer, layer.attn_post_norm, y_.get() + t * stride, x);
      if (layer.mlp_norm == nullptr) return hidden_inputs_.set(kernels_, int(t), x);
      float* normed = scratch_[thread].gate.reserve(hidden);
      kernels_.rms_norm(x, layer.mlp_norm, hidden, layer.norm_eps, normed);
      hidden_inputs_.set(kernels_, int(t), normed);
    });
    layer.is_mixture() ? mixture(layer, tokens) : mlp(layer, tokens);
  }
  head(sink);
}

void Forward::reserve(const Step& step) {
  const size_t tokens = step.input_ids.size();
  x_.reserve(tokens * model_.hidden_size);
  row_of_token_.resize(tokens);
  sampled_.clear();
  for (size_t r = 0; r < step.rows.size(); ++r) {
    const Row& row = step.rows[r];
    std::fill_n(row_of_token_.begin() + row.first_token, row.num_tokens, int32_t(r));
    if (row.wants_sample) sampled_.push_back(int32_t(r));
  }
}

void Forward::touch_pages(const Step& step) {
  pieces_.clear();
  for (int group = 0; group < pool_.groups(); ++group) {
    int32_t last = -1;
    for (const Row& row : step.rows) {
      const std::vector<int32_t>& pages = row.pages[group];
      for (size_t i = size_t(row.prefix_len) / kPage; i < pages.size(); ++i) last = std::max(last, pages[i]);
    }
    pool_.use(group, last + 1, pieces_);
  }
  if (pieces_.empty()) return;
  // A thread that would only wait has a piece more.
  while (pieces_.size() % pieces_at_once() != 0 && pool_.look_ahead(pieces_)) {}
  touch_pieces();
}

bool Forward::touch_ahead() noexcept {
  pieces_.clear();
  while (pieces_.size() < pieces_at_once() && pool_.look_ahead(pieces_)) {}
  touch_pieces();
  return !pieces_.empty();
}

size_t Forward::pieces_at_once() const { return size_t(std::min(threads_.size(), kMostPiecesAtOnce)); }

void Forward::touch_pieces() {
  threads_.each(int64_t(pieces_.size()), [&](int64_t i, int) { KVPool::touch(pieces_[i]); });
}

void Forward::copy_pages(const Step& step) {
  if (step.copies.empty()) return;
  const int64_t copies = int64_t(step.copies.size());
  threads_.each(copies * int64_t(model_.layers.size()), [&](int64_t i, int) {
    const PageCopy& copy = step.copies[i % copies];
    const int layer = int(i / copies);
    if (model_.layers[layer].attention.kv_group != copy.group) return;
    std::memcpy(pool_.page(layer, copy.to), pool_.page(layer, copy.from), pool_.page_bytes(layer));
  });
}

void Forward::plan(const Step& step) {
  plans_.clear();
  for (int i : plan_layer_) plans_.push_back(plan_attention(step, model_.layers[i].attention, threads_.size()));
  read_pages_.resize(plan_layer_.size());
  for (size_t p = 0; p < plan_layer_.size(); ++p) {
    const Attention& a = model_.layers[plan_layer_[p]].attention;
    const size_t most = ahead_bytes() / pool_.page_bytes(plan_layer_[p]);
    std::vector<int32_t>& pages = read_pages_[p];
    pages.clear();
    if (kernels_.rows_at_once == 0 || step.input_ids.size() <= size_t(kernels_.rows_at_once)) continue;
    seen_pages_.assign(size_t(pool_.pages(a.kv_group)), 0);
    for (const Row& row : step.rows) {
      const std::vector<int32_t>& all = row.pages[a.kv_group];
      for (size_t i = size_t(first_span(row.prefix_len, a.window)) * kSpan / kPage; i < all.size() && pages.size() < most; ++i)
        if (!std::exchange(seen_pages_[all[i]], 1)) pages.push_back(all[i]);
    }
  }
}

// Each thread asks for its share; behind the last layer there is nothing to ask for.
void Forward::ask_for_keys(int layer) {
  if (layer == int(model_.layers.size())) {
    for (Scratch& scratch : scratch_) scratch.ahead = {};
    return;
  }
  const std::vector<int32_t>& pages = read_pages_[plan_of_layer_[layer]];
  const size_t threads = scratch_.size();
  for (size_t t = 0; t < threads; ++t) {
    const size_t from = pages.size() * t / threads, to = pages.size() * (t + 1) / threads;
    scratch_[t].ahead = {pool_.page(layer, 0), pool_.page_stride(layer), pool_.page_bytes(layer), pages.data() + from, int32_t(to - from)};
  }
}

void Forward::embed(const Step& step) {
  const int hidden = model_.hidden_size;
  each_token(int(step.input_ids.size()), [&](int64_t t, int thread) {
    float* row = scratch_[thread].gate.reserve(model_.embed.padded_cols());
    kernels_.dequantize_row(model_.embed, step.input_ids[t], row);
    float* x = x_.get() + t * hidden;
    std::memcpy(x, row, hidden * sizeof(float));
    if (model_.embed_scale != 1.0f) kernels_.scale(x, model_.embed_scale, hidden);
  });
}

void Forward::add_residual(const Layer& layer, const float* post_norm, float* y, float* x) const {
  const int hidden = model_.hidden_size;
  if (post_norm != nullptr) kernels_.rms_norm(y, post_norm, hidden, layer.norm_eps, y);
  if (layer.residual_scale == 1.0f)
    kernels_.add(x, y, hidden);
  else
    kernels_.add_scaled(x, y, layer.residual_scale, hidden);
}

void Forward::products(const std::vector<Product>& all, int rows) {
  struct Range {
    int product, first_row, rows, first_block, blocks;
  };
  static thread_local std::vector<Range> items;
  items.clear();
  int blocks = 0;
  for (const Product& p : all) blocks += p.linear->weight.blocks();
  const Inputs& inputs = *all[0].inputs;
  const int tile = tile_rows(inputs.view(all[0].linear->weight).stride, rows);
  const int per_item = blocks_per_item(blocks, threads_.size(), (rows + tile - 1) / tile);
  for (int row = 0; row < rows; row += tile)
    for (size_t p = 0; p < all.size(); ++p)
      for (int b = 0; b < all[p].linear->weight.blocks(); b += per_item)
        items.push_back({int(p), row, std::min(tile, rows - row), b, std::min(per_item, all[p].linear->weight.blocks() - b)});
  const std::vector<Range>& ranges = items;
  threads_.each(int64_t(ranges.size()), [&](int64_t i, int thread) {
    const Range& r = ranges[i];
    const Product& p = all[r.product];
    const Matrix& w = p.linear->weight;
    kernels_.matmul(w, p.inputs->view(w), r.first_row, r.rows, r.first_block, r.blocks, p.y, p.stride, scratch_[thread].ahead);
    if (p.linear->bias == nullptr) return;
    const int column = r.first_block * kBlockRows;
    const int columns = std::min(r.blocks * kBlockRows, w.rows - column);
    for (int row = r.first_row; row < r.first_row + r.rows; ++row) kernels_.add(p.y + row * p.stride + column, p.linear->bias + column, columns);
  });
}

void Forward::attend(const Step& step, int index) {
  const Layer& layer = model_.layers[index];
  const Attention& a = layer.attention;
  const int hidden = model_.hidden_size, tokens = int(step.input_ids.size());
  hidden_inputs_.reserve(tokens, hidden, Rounding::kRefined, {&a.q.weight, &a.k.weight, &a.v.weight});
  each_token(tokens, [&](int64_t t, int thread) {
    const float* x = x_.get() + t * hidden;
    if (layer.attn_norm == nullptr) return hidden_inputs_.set(kernels_, int(t), x);
    float* normed = scratch_[thread].gate.reserve(hidden);
    kernels_.rms_norm(x, layer.attn_norm, hidden, layer.norm_eps, normed);
    hidden_inputs_.set(kernels_, int(t), normed);
  });
  const size_t stride = padded(a.q) + padded(a.k) + padded(a.v);
  float* qkv = qkv_.reserve(stride * tokens);
  products({{&a.q, &hidden_inputs_, qkv, stride},
            {&a.k, &hidden_inputs_, qkv + padded(a.q), stride},
            {&a.v, &hidden_inputs_, qkv + padded(a.q) + padded(a.k), stride}},
           tokens);
  queries_.reserve(size_t(tokens) * a.heads * padded_dim(a.head_dim));
  each_token(tokens, [&](int64_t t, int) { keys_and_queries(layer, index, int(t), step.rows[row_of_token_[t]]); });

  mixed_.reserve(size_t(tokens) * a.heads * a.head_dim);
  const AttentionPlan& plan = plans_[plan_of_layer_[index]];
  if (!plan.shared.empty()) attend_shared(step, layer, index, plan);
  // Late tiles see most keys: they go first, so that no long one is left for the end.
  const int64_t tiles = int64_t(plan.tiles.size());
  threads_.each(tiles * a.kv_heads, [&](int64_t i, int thread) {
    attend_tile(step, layer, index, plan, plan.tiles[tiles - 1 - i / a.kv_heads], int(i % a.kv_heads), thread);
  });
}

void Forward::keys_and_queries(const Layer& layer, int index, int token, const Row& row) {
  const Attention& a = layer.attention;
  const size_t q_cols = padded(a.q), k_cols = padded(a.k), stride = q_cols + k_cols + padded(a.v);
  float* q = qkv_.get() + token * stride;
  float* k = q + q_cols;
  const float* v = k + k_cols;
  if (a.qk_norm == QkNorm::kProjection) {
    kernels_.rms_norm(q, a.q_norm, a.heads * a.head_dim, layer.norm_eps, q);
    kernels_.rms_norm(k, a.k_norm, a.kv_heads * a.head_dim, layer.norm_eps, k);
  } else if (a.qk_norm == QkNorm::kHead) {
    for (int h = 0; h < a.heads; ++h) kernels_.rms_norm(q + h * a.head_dim, a.q_norm, a.head_dim, layer.norm_eps, q + h * a.head_dim);
    for (int h = 0; h < a.kv_heads; ++h) kernels_.rms_norm(k + h * a.head_dim, a.k_norm, a.head_dim, layer.norm_eps, k + h * a.head_dim);
  }
  if (a.rope >= 0) {
    const int half = int(model_.ropes[a.rope].frequencies.size());
    const float* cosines = angles_[a.rope].get() + size_t(token) * half;
    const float* sines = cosines + row_of_token_.size() * half;
    kernels_.rope(q, a.heads, a.head_dim, half, cosines, sines);
    kernels_.rope(k, a.kv_heads, a.head_dim, half, cosines, sines);
  }
  // Queries lie [key head][token][query head of it], so that a tile's are one run.
  const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim), tokens = int(row_of_token_.size());
  const int position = row.prefix_len + token - row.first_token;
  uint8_t* page = pool_.page(index, row.pages[a.kv_group][position / kPage]);
  for (int h = 0; h < a.kv_heads; ++h) {
    for (int g = 0; g < group; ++g)
      kernels_.to_query(q + (h * group + g) * a.head_dim, a.head_dim, queries_.get() + ((size_t(h) * tokens + token) * group + g) * dim);
    kernels_.store_kv(k + h * a.head_dim, v + h * a.head_dim, a.head_dim, position % kPage, page + h * page_head_bytes(a.head_dim));
  }
}

Span Forward::span_of(const Row& row, const Attention& a, int layer, int span, int end, int head, Scratch& scratch) const {
  const int first_key = span * kSpan;
  const int keys = std::min(end - first_key, kSpan);
  const int32_t* pages = row.pages[a.kv_group].data() + first_key / kPage;
  scratch.pages.clear();
  for (int p = 0; p * kPage < keys; ++p) scratch.pages.push_back(pool_.page(layer, pages[p]) + head * page_head_bytes(a.head_dim));
  return {scratch.pages.data(), first_key, keys};
}

Partial Forward::partial(Buffer<float>& memory, int count, int dim) const {
  float* base = memory.reserve(size_t(count) * (dim + 2));
  return {base, base + count, base + 2 * count};
}

// Partials lie [partial][key head], each m [group] | l [group] | o [group][padded_dim].
void Forward::attend_shared(const Step& step, const Layer& layer, int index, const AttentionPlan& plan) {
  const Attention& a = layer.attention;
  const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim), tokens = int(row_of_token_.size());
  const size_t each = size_t(group) * (dim + 2);
  float* partials = partials_.reserve(each * a.kv_heads * plan.num_partials);
  threads_.each(int64_t(plan.shared.size()) * a.kv_heads, [&](int64_t i, int thread) {
    const SharedSpan& shared = plan.shared[i / a.kv_heads];
    const int head = int(i % a.kv_heads), count = int(shared.rows.size()) * group;
    Scratch& scratch = scratch_[thread];
    uint16_t* q = scratch.queries.reserve(size_t(count) * dim);
    int32_t* positions = scratch.positions.reserve(count);
    for (size_t r = 0; r < shared.rows.size(); ++r) {
      const Row& row = step.rows[shared.rows[r]];
      std::memcpy(q + r * group * dim, queries_.get() + (size_t(head) * tokens + row.first_token) * group * dim, size_t(group) * dim * 2);
      std::fill_n(positions + r * group, group, row.prefix_len);
    }
    const Partial out = partial(scratch.state, count, dim);
    const Span span = span_of(step.rows[shared.rows[0]], a, index, shared.span, (shared.span + 1) * kSpan, head, scratch);
    kernels_.attend({q, positions, count, a.head_dim, a.window, a.scale, a.softcap}, span, out);
    for (size_t r = 0; r < shared.rows.size(); ++r) {
      float* to = partials + (size_t(shared.partials[r]) * a.kv_heads + head) * each;
      std::memcpy(to, out.m + r * group, group * sizeof(float));
      std::memcpy(to + group, out.l + r * group, group * sizeof(float));
      std::memcpy(to + 2 * group, out.o + r * group * dim, size_t(group) * dim * sizeof(float));
    }
  });
}

void Forward::attend_tile(
    const Step& step, const Layer& layer, int index, const AttentionPlan& plan, const TokenTile& tile, int head, int thread) {
  const Attention& a = layer.attention;
  const Row& row = step.rows[tile.row];
  const int group = a.heads / a.kv_heads, dim = padded_dim(a.head_dim), tokens = int(row_of_token_.size());
  const int count = tile.count * group, first = row.prefix_len + tile.first_token - row.first_token, last = first + tile.count - 1;
  const std::vector<int32_t>& partial_of = plan.partial_of[tile.row];
  Scratch& scratch = scratch_[thread];
  int32_t* positions = scratch.positions.reserve(count);
  for (int t = 0; t < tile.count; ++t) std::fill_n(positions + t * group, group, first + t);
  const Queries queries{queries_.get() + (size_t(head) * tokens + tile.first_token) * group * dim, positions, count, a.head_dim, a.window, a.scale, a.softcap};

  const Partial state = partial(scratch.state, count, dim);
  std::fill_n(state.m, count, -std::numeric_limits<float>::infinity());
  std::fill_n(state.l, count, 0.0f);
  std::fill_n(state.o, size_t(count) * dim, 0.0f);
  const int from = first_span(first, a.window);
  for (int s = from; s * kSpan <= last; ++s) {
    const int known = size_t(s - from) < partial_of.size() ? partial_of[s - from] : -1;
    if (known >= 0) {
      float* base = partials_.get() + (size_t(known) * a.kv_heads + head) * size_t(group) * (dim + 2);
      kernels_.fold(state, {base, base + group, base + 2 * group}, count, a.head_dim);
      continue;
    }
    const Partial next = partial(scratch.next, count, dim);
    kernels_.attend(queries, span_of(row, a, index, s, last + 1, head, scratch), next);
    kernels_.fold(state, next, count, a.head_dim);
  }
  const size_t width = size_t(a.heads) * a.head_dim;
  for (int t = 0; t < tile.count; ++t) {
    const Partial own{state.m + t * group, state.l + t * group, state.o + size_t(t) * group * dim};
    kernels_.finish(own, group, a.head_dim, mixed_.get() + (tile.first_token + t) * width + size_t(head) * group * a.head_dim);
  }
}

// Behind the last layer's attention only rows that want a sample go on, each with its last token: x_ and mixed_ become theirs.
void Forward::keep_sampled(const Step& step) {
  const Attention& a = model_.layers.back().attention;
  const size_t hidden = model_.hidden_size, width = size_t(a.heads) * a.head_dim;
  for (size_t s = 0; s < sampled_.size(); ++s) {
    const Row& row = step.rows[sampled_[s]];
    // Rows come in order, so a token moves down or stays, and is not overwritten before it is read.
    const size_t token = size_t(row.first_token) + row.num_tokens - 1;
    std::memmove(x_.get() + s * hidden, x_.get() + token * hidden, hidden * sizeof(float));
    std::memmove(mixed_.get() + s * width, mixed_.get() + token * width, width * sizeof(float));
  }
}

void Forward::gated(const GatedMLP& mlp, const Inputs& inputs, int first_row, int rows, int first_block, int blocks, Inputs& to, int thread) {
  Scratch& scratch = scratch_[thread];
  const size_t width = size_t(blocks) * kBlockRows;
  float* gate = scratch.gate.reserve(width * rows);
  float* up = scratch.up.reserve(width * rows);
  // `matmul` addresses y by row and block; these tiles hold neither the rows nor the blocks before.
  const ptrdiff_t origin = ptrdiff_t(first_row) * ptrdiff_t(width) + ptrdiff_t(first_block) * kBlockRows;
  kernels_.matmul(mlp.gate.weight, inputs.view(mlp.gate.weight), first_row, rows, first_block, blocks, gate - origin, width, scratch.ahead);
  kernels_.matmul(mlp.up.weight, inputs.view(mlp.up.weight), first_row, rows, first_block, blocks, up - origin, width, scratch.ahead);
  const int column = first_block * kBlockRows, columns = std::min(int(width), mlp.intermediate - column);
  for (int r = 0; r < rows; ++r) {
    if (mlp.gate.bias != nullptr) kernels_.add(gate + r * width, mlp.gate.bias + column, columns);
    if (mlp.up.bias != nullptr) kernels_.add(up + r * width, mlp.up.bias + column, columns);
    kernels_.gated(gate + r * width, up + r * width, columns, mlp.activation, gate + r * width);
    to.set_columns(kernels_, first_row + r, column, gate + r * width, columns);
  }
}

void Forward::mlp(const Layer& layer, int tokens) {
  const GatedMLP& mlp = layer.mlp;
  const int blocks = mlp.gate.weight.blocks(), hidden = model_.hidden_size;
  const int tile = std::min(tokens, kGatedTileRows), tiles = (tokens + tile - 1) / tile;
  const int per_item = std::min(blocks_per_item(blocks, threads_.size(), tiles), 4);
  const int groups = (blocks + per_item - 1) / per_item;
  const size_t stride = padded(mlp.down);
  inputs_.reserve(tokens, mlp.intermediate, Rounding::kPlain, {&mlp.down.weight});
  threads_.each(int64_t(tiles) * groups, [&](int64_t i, int thread) {
    const int row = int(i / groups) * tile, block = int(i % groups) * per_item;
    gated(mlp, hidden_inputs_, row, std::min(tile, tokens - row), block, std::min(per_item, blocks - block), inputs_, thread);
  });
  products({{&mlp.down, &inputs_, y_.reserve(stride * tokens), stride}}, tokens);
  each_token(tokens, [&](int64_t t, int) { add_residual(layer, layer.mlp_post_norm, y_.get() + t * stride, x_.get() + t * hidden); });
}

void Forward::head(const Sink& sink) {
  const Matrix& w = model_.head.weight;
  const int hidden = model_.hidden_size, rows = int(sampled_.size()), vocab = model_.vocab_size;
  const size_t stride = padded(model_.head);
  inputs_.reserve(rows, hidden, Rounding::kRefined, {&w});
  each_token(rows, [&](int64_t s, int) {
    float* x = x_.get() + s * hidden;
    kernels_.rms_norm(x, model_.final_norm, hidden, model_.final_norm_eps, x);
    inputs_.set(kernels_, int(s), x);
  });
  float* logits = logits_.reserve(stride * size_t(std::min(rows, kLogitRows)));
  for (int from = 0; from < rows; from += kLogitRows) {
    const int count = std::min(kLogitRows, rows - from);
    const int per_item = blocks_per_item(w.blocks(), threads_.size(), 1);
    const int items = (w.blocks() + per_item - 1) / per_item;
    threads_.each(items, [&](int64_t i, int thread) {
      const int block = int(i) * per_item, blocks = std::min(per_item, w.blocks() - block);
      kernels_.matmul(w, inputs_.view(w), from, count, block, blocks, logits - ptrdiff_t(from) * ptrdiff_t(stride), stride,
                      scratch_[thread].ahead);
    });
    threads_.each(count, [&](int64_t i, int thread) {
      float* own = logits + i * ptrdiff_t(stride);
      if (model_.head.bias != nullptr) kernels_.add(own, model_.head.bias, vocab);
      if (model_.logit_scale != 1.0f) kernels_.scale(own, model_.logit_scale, vocab);
      if (model_.logit_softcap != 0.0f) kernels_.softcap(own, model_.logit_softcap, vocab);
      sink(sampled_[from + i], own, thread);
    });
  }
}

}  // namespace sterna
