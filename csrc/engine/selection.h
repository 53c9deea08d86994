// The largest of many logits, without sorting them all.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace sterna {

// What a thread that samples works in; contents mean nothing between calls.
struct SamplerScratch {
  std::vector<int32_t> blocks;
  int num_blocks = 0;
  std::vector<float> values;
  std::vector<float> raw;  // logits before edits, where logprobs ask
  std::vector<Contender> contenders;

  void reserve(int vocab_size, int most_contenders);
};

// A value that at least k (1 <= k <= n) of x[n] reach, and few more than k do.
float lower_bound_of_kth(const float* x, int n, int k, std::vector<float>& work);

// scratch.values: those of the blocks in scratch that are >= cut and below `below`.
void take_values(const float* x, int n, float cut, float below, SamplerScratch& scratch);

// scratch.blocks, num_blocks: those that hold a value >= cut; and their values as above.
void collect(const Kernels& kernels, const float* x, int n, float cut, float below, SamplerScratch& scratch);

// The smallest of z that a nucleus keeps: of those for which the sum of exp over all larger ones is below `mass`, the smallest. z isn't empty, and is
// reordered.
float nucleus_floor(std::vector<float>& z, double mass);

}  // namespace sterna
