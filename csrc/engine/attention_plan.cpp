#include "attention_plan.h"

#include <algorithm>

namespace sterna {
namespace {

constexpr int kPagesPerSpan = kSpan / kPage;
// Partial results of a layer take so much memory at most: where that is full, rows go their own way.
constexpr size_t kPartialBytes = 64 << 20;

struct Reader {
  int32_t page;  // the span's last page says which pages all of it lies on: what precedes a shared page is shared
  int32_t row;
};

// Whole spans that `rows` see, by span, then page.
std::vector<std::vector<Reader>> readers_by_span(const Step& step, const std::vector<int32_t>& rows, int group, int window) {
  std::vector<std::vector<Reader>> spans;
  for (int32_t row : rows) {
    const Row& r = step.rows[row];
    const int whole = r.seq_len() / kSpan;
    if (int(spans.size()) < whole) spans.resize(whole);
    for (int s = first_span(r.prefix_len, window); s < whole; ++s) {
      // Where a window cuts into the span, its first pages may be stand-ins.
      if (window != kNoWindow && int64_t(s) * kSpan <= int64_t(r.prefix_len) - window) continue;
      spans[s].push_back({r.pages[group][size_t(s + 1) * kPagesPerSpan - 1], row});
    }
  }
  for (auto& readers : spans)
    std::stable_sort(readers.begin(), readers.end(), [](const Reader& a, const Reader& b) { return a.page < b.page; });
  return spans;
}

}  // namespace

AttentionPlan plan_attention(const Step& step, const Attention& attention, int threads) {
  AttentionPlan plan;
  plan.partial_of.resize(step.rows.size());
  const int window = attention.window;
  const int tokens_per_tile = std::max(1, kQueries * attention.kv_heads / attention.heads);
  const int most_partials = int(kPartialBytes / (size_t(attention.heads) * size_t(padded_dim(attention.head_dim) + 2) * sizeof(float)));
  std::vector<int32_t> single;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const Row& row = step.rows[i];
    if (row.num_tokens == 1) single.push_back(int32_t(i));
    for (int t = 0; t < row.num_tokens; t += tokens_per_tile)
      plan.tiles.push_back({int32_t(i), row.first_token + t, std::min(tokens_per_tile, row.num_tokens - t)});
  }
  const bool idle_threads = int64_t(plan.tiles.size()) * attention.kv_heads < 4 * threads;
  if (single.size() < 2 && !idle_threads) return plan;

  const auto spans = readers_by_span(step, single, attention.kv_group, window);
  for (size_t s = 0; s < spans.size(); ++s) {
    const auto& readers = spans[s];
    for (size_t from = 0, to; from < readers.size(); from = to) {
      for (to = from + 1; to < readers.size() && readers[to].page == readers[from].page && to - from < size_t(tokens_per_tile);) ++to;
      if ((to - from < 2 && !idle_threads) || plan.num_partials + int(to - from) > most_partials) continue;
      SharedSpan shared{int32_t(s), {}, {}};
      for (size_t i = from; i < to; ++i) {
        const Row& row = step.rows[readers[i].row];
        auto& own = plan.partial_of[readers[i].row];
        const int first = first_span(row.prefix_len, window);
        own.resize(size_t(row.seq_len() - 1) / kSpan + 1 - first, -1);
        own[s - first] = plan.num_partials;
        shared.rows.push_back(readers[i].row);
        shared.partials.push_back(plan.num_partials++);
      }
      plan.shared.push_back(std::move(shared));
    }
  }
  return plan;
}

}  // namespace sterna
