// Who attends to what in one step, for the layers of one KV group: the same for all of them, so it is worked out once.
#pragma once

#include <vector>

#include "model.h"
#include "step.h"

namespace sterna {

// Queries of at most so many heads and tokens go through a span together: their scores stay in the nearest cache.
constexpr int kQueries = 48;

// Consecutive tokens of one row, which take their spans one after another.
struct TokenTile {
  int32_t row;
  int32_t first_token;  // in the step
  int32_t count;
};

// Single-token rows that see the whole of a span and lie on the same pages there: they read its keys and values once.
struct SharedSpan {
  int32_t span;
  std::vector<int32_t> rows;      // of the step
  std::vector<int32_t> partials;  // where each one's result goes
};

struct AttentionPlan {
  std::vector<TokenTile> tiles;
  std::vector<SharedSpan> shared;
  int32_t num_partials = 0;
  // Per row and span, counted from the row's first visible span: the partial that is there before its tile runs, or -1.
  std::vector<std::vector<int32_t>> partial_of;
};

// The first span in which a query at `position` sees a key.
inline int first_span(int position, int window) {
  const int64_t first = int64_t(position) - window + 1;
  return first > 0 ? int(first / kSpan) : 0;
}

// For layers whose attention has this one's group, window and shape. `threads`: with too few tiles to occupy them, single rows' spans are also
// computed apart.
AttentionPlan plan_attention(const Step& step, const Attention& attention, int threads);

}  // namespace sterna
