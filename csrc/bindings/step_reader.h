// Python's arrays of one step, checked: whatever passes, the forward may index with.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <tuple>
#include <vector>

#include "engine/kv_pool.h"
#include "engine/step.h"

namespace sterna {

using Ints = nanobind::ndarray<const int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Bytes = nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Table = nanobind::ndarray<const int32_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// The arrays of `executor/base.py: ForwardBatch`, with a (req_to_token, out_cache_loc, copied_from, copied_to) per KV group.
struct StepArrays {
  int64_t number;
  Ints input_ids;
  std::optional<Ints> input_from;
  Ints row_splits, prefix_lens, seq_lens, req_pool_idx;
  Bytes wants;
  std::vector<std::tuple<Table, Ints, Ints, Ints>> groups;
};

// Throws std::invalid_argument naming what is wrong and where.
Step read_step(const StepArrays& arrays, const Model& model, const KVPool& pool);

}  // namespace sterna
