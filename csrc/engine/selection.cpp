#include "selection.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace sterna {

void SamplerScratch::reserve(int vocab_size, int most_contenders) {
  blocks.resize(size_t(vocab_size) / 4 + 16);
  values.reserve(size_t(vocab_size));
  contenders.resize(size_t(most_contenders));
}

float lower_bound_of_kth(const float* x, int n, int k, std::vector<float>& work) {
  // The maxima of groups: the k-th largest of them is reached by k values, one of each group. Group (c, lane) is the elements c * 16 * size + lane,
  // + 16, + 32, ...: maxima of vectors, no sums across them.
  constexpr int kLanes = 16;
  int size = 64;
  while (size > 1 && n / size < std::max(8 * k, 512)) size /= 2;
  const int chunk = kLanes * size, whole = n / chunk * chunk;
  work.assign(x + whole, x + n);
  for (int first = 0; first < whole; first += chunk) {
    float largest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) largest[lane] = x[first + lane];
    for (int i = kLanes; i < chunk; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = x[first + i + lane];
        largest[lane] = value > largest[lane] ? value : largest[lane];
      }
    }
    work.insert(work.end(), largest, largest + kLanes);
  }
  std::nth_element(work.begin(), work.begin() + (k - 1), work.end(), std::greater<float>());
  return work[size_t(k - 1)];
}

void take_values(const float* x, int n, float cut, float below, SamplerScratch& scratch) {
  scratch.values.clear();
  for (int b = 0; b < scratch.num_blocks; ++b) {
    const int first = 4 * scratch.blocks[size_t(b)], last = std::min(first + 4, n);
    for (int i = first; i < last; ++i) {
      if (x[i] >= cut && x[i] < below) scratch.values.push_back(x[i]);
    }
  }
}

void collect(const Kernels& kernels, const float* x, int n, float cut, float below, SamplerScratch& scratch) {
  scratch.num_blocks = kernels.blocks_at_least(x, n, cut, scratch.blocks.data());
  take_values(x, n, cut, below, scratch);
}

float nucleus_floor(std::vector<float>& z, double mass) {
  auto first = z.begin(), last = z.end();  // the floor is in here, and `above` is the sum before
  double above = 0;
  while (last - first > 32) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<float>());
    double sum = above;
    for (auto each = first; each != middle; ++each) sum += std::exp(double(*each));
    if (sum < mass) {
      above = sum;
      first = middle;
    } else {
      last = middle;
    }
  }
  std::sort(first, last, std::greater<float>());
  float floor = *first;
  for (; first != last && above < mass; ++first) {
    floor = *first;
    above += std::exp(double(floor));
  }
  return floor;
}

}  // namespace sterna
