#include "step_reader.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace sterna {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string at(size_t row) { return " of row " + std::to_string(row); }

// The widest window of a group's layers: what lies behind it no layer reads.
int group_window(const Model& model, int group) {
  int window = 0;
  for (const Layer& layer : model.layers)
    if (layer.attention.kv_group == group) window = std::max(window, layer.attention.window);
  return window;
}

// `where()` is asked for its words only where they are needed: this runs for every page of every row.
template <class Where>
int32_t read_page(int32_t slot, int64_t num_pages, const Where& where) {
  if (slot < 0 || slot % kPage != 0 || slot / kPage >= num_pages)
    refuse("slot " + std::to_string(slot) + " of " + where() + " is not the first of a page of the pool");
  return slot / kPage;
}

std::vector<int32_t> read_pages(const Table& table, const Row& row, size_t r, int window, int64_t num_pages) {
  if (size_t(row.pool_index) >= table.shape(0) || size_t(row.seq_len()) > table.shape(1)) refuse("req_to_token is too small for its entries" + at(r));
  const int32_t* slots = table.data() + size_t(row.pool_index) * table.shape(1);
  const int64_t first_seen = std::max<int64_t>(0, int64_t(row.prefix_len) - window + 1) / kPage;
  std::vector<int32_t> pages(size_t(row.seq_len() + kPage - 1) / kPage);
  for (size_t p = size_t(first_seen); p < pages.size(); ++p) pages[p] = read_page(slots[p * kPage], num_pages, [r] { return "req_to_token" + at(r); });
  std::fill(pages.begin(), pages.begin() + first_seen, pages[first_seen]);
  return pages;
}

// Copies run at once: each writes a page that no other one reads or writes.
void refuse_tangled(const std::vector<PageCopy>& copies) {
  std::set<std::pair<int32_t, int32_t>> written;
  for (const PageCopy& copy : copies)
    if (!written.insert({copy.group, copy.to}).second) refuse("copied_to has " + std::to_string(copy.to * kPage) + " twice");
  for (const PageCopy& copy : copies)
    if (written.count({copy.group, copy.from})) refuse("copied_from has " + std::to_string(copy.from * kPage) + ", which copied_to has too");
}

// Two threads may sample two rows at once, each with the state of its own.
void refuse_repeats(const Ints& pool_indices) {
  std::vector<int32_t> sorted(pool_indices.data(), pool_indices.data() + pool_indices.shape(0));
  std::sort(sorted.begin(), sorted.end());
  const auto repeated = std::adjacent_find(sorted.begin(), sorted.end());
  if (repeated != sorted.end()) refuse("req_pool_idx has " + std::to_string(*repeated) + " twice");
}

Row read_row(const StepArrays& in, size_t r) {
  Row row;
  const int64_t first = in.row_splits.data()[r], end = in.row_splits.data()[r + 1];
  row.first_token = int32_t(first);
  row.num_tokens = int32_t(end - first);
  row.prefix_len = in.prefix_lens.data()[r];
  row.pool_index = in.req_pool_idx.data()[r];
  row.wants_sample = in.wants.data()[r] != 0;
  if (end <= first) refuse("row_splits" + at(r) + " hold no token");
  if (row.prefix_len < 0 || row.pool_index < 0) refuse("prefix_lens or req_pool_idx" + at(r) + " is negative");
  if (int64_t(row.prefix_len) + row.num_tokens != in.seq_lens.data()[r]) refuse("seq_lens" + at(r) + " is not prefix_lens + its tokens");
  if (in.input_from) {
    row.input_from = in.input_from->data()[r];
    if (row.input_from >= 0 && row.num_tokens != 1) refuse("input_from" + at(r) + ", which has several tokens");
  }
  return row;
}

}  // namespace

Step read_step(const StepArrays& in, const Model& model, const KVPool& pool) {
  const size_t rows = in.req_pool_idx.shape(0), tokens = in.input_ids.shape(0);
  auto sized = [](const auto& array, size_t size, const char* name) {
    if (array.shape(0) != size) refuse(std::string(name) + " has " + std::to_string(array.shape(0)) + " entries, expected " + std::to_string(size));
  };
  sized(in.row_splits, rows + 1, "row_splits");
  sized(in.prefix_lens, rows, "prefix_lens");
  sized(in.seq_lens, rows, "seq_lens");
  sized(in.wants, rows, "wants");
  if (in.input_from) sized(*in.input_from, rows, "input_from");
  if (rows == 0) refuse("req_pool_idx is empty: a step has rows");
  if (int(in.groups.size()) != model.kv_groups) refuse("groups: expected " + std::to_string(model.kv_groups));
  const size_t copies = in.groups.empty() ? 0 : std::get<2>(in.groups[0]).shape(0);
  for (const auto& [table, out_cache_loc, copied_from, copied_to] : in.groups) {
    sized(out_cache_loc, tokens, "out_cache_loc");
    sized(copied_from, copies, "copied_from");
    sized(copied_to, copies, "copied_to");
  }
  if (in.row_splits.data()[0] != 0 || in.row_splits.data()[rows] != int64_t(tokens)) refuse("row_splits don't cover input_ids");

  refuse_repeats(in.req_pool_idx);

  Step step;
  step.number = in.number;
  step.input_ids.assign(in.input_ids.data(), in.input_ids.data() + tokens);
  for (int32_t id : step.input_ids)
    if (id < 0 || id >= model.vocab_size) refuse("input_ids: " + std::to_string(id) + " is not a token of this model");
  step.positions.resize(tokens);
  std::vector<int> windows;
  for (int g = 0; g < model.kv_groups; ++g) windows.push_back(group_window(model, g));
  for (size_t r = 0; r < rows; ++r) {
    Row row = read_row(in, r);
    for (int t = 0; t < row.num_tokens; ++t) step.positions[row.first_token + t] = row.prefix_len + t;
    for (size_t g = 0; g < in.groups.size(); ++g) {
      row.pages.push_back(read_pages(std::get<0>(in.groups[g]), row, r, windows[g], pool.pages(int(g))));
      for (int t = 0; t < row.num_tokens; ++t) {
        const int position = row.prefix_len + t;
        const int64_t slot = int64_t(row.pages[g][position / kPage]) * kPage + position % kPage;
        if (std::get<1>(in.groups[g]).data()[row.first_token + t] != slot)
          refuse("out_cache_loc" + at(r) + " is not where req_to_token has position " + std::to_string(position));
      }
    }
    step.rows.push_back(std::move(row));
  }
  for (size_t g = 0; g < in.groups.size(); ++g)
    for (size_t c = 0; c < copies; ++c) {
      const int32_t from = read_page(std::get<2>(in.groups[g]).data()[c], pool.pages(int(g)), [] { return std::string("copied_from"); });
      const int32_t to = read_page(std::get<3>(in.groups[g]).data()[c], pool.pages(int(g)), [] { return std::string("copied_to"); });
      step.copies.push_back({int32_t(g), from, to});
    }
  refuse_tangled(step.copies);
  return step;
}

}  // namespace sterna
