// One step's input and output: `executor/base.py: ForwardBatch` and `StepOutput`, checked and copied out of Python's arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "sampler.h"

namespace sterna {

struct Row {
  int32_t pool_index = 0;     // sampler state
  int32_t first_token = 0;    // index of its first input token in the step
  int32_t num_tokens = 0;
  int32_t prefix_len = 0;     // position of its first input token
  int32_t input_from = -1;    // row of the step before whose token it takes
  bool wants_sample = false;
  // Per group, the page of each kPage positions up to seq_len; those wholly behind every window of the group repeat a page in sight.
  std::vector<std::vector<int32_t>> pages;

  int32_t seq_len() const { return prefix_len + num_tokens; }
};

// A page that is copied whole before anything of the step is written: a row begins its tokens within `to`.
struct PageCopy {
  int32_t group, from, to;
};

struct Step {
  int64_t number = 0;
  std::vector<int32_t> input_ids;  // (T,)
  std::vector<int32_t> positions;  // (T,)
  std::vector<Row> rows;
  std::vector<PageCopy> copies;
};

struct StepResult {
  int64_t number = 0;
  std::vector<SampledToken> rows;  // (R,); default for a row that wanted none
};

}  // namespace sterna
