#include "checksum.h"

#include <algorithm>
#include <array>
#include <vector>

#include "numbers.h"
#include "parts.h"

namespace sterna {

namespace {

constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15, kLane = 0xd1342543de82ef95;  // odd, so that no step loses anything
constexpr size_t kChunk = 1 << 20, kStripe = 64;
constexpr size_t kChunksPerThread = 4;  // below which another thread costs more than it saves

using Lanes = std::array<uint64_t, kStripe / 8>;

uint64_t step(uint64_t sum, uint64_t word) {
  sum ^= word;
  return (sum << 29 | sum >> 35) * kMultiplier;
}

void take(Lanes& lanes, const uint8_t* stripe) {
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = step(lanes[i], load<uint64_t>(stripe + 8 * i));
}

Lanes lanes_of(const uint8_t* data, size_t size) {
  Lanes lanes;
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = kLane * (i + 1);
  size_t at = 0;
  for (; at + kStripe <= size; at += kStripe) take(lanes, data + at);
  if (at < size) {
    uint8_t last[kStripe] = {};
    std::memcpy(last, data + at, size - at);
    take(lanes, last);
  }
  return lanes;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t size, int threads) {
  const size_t chunks = (size + kChunk - 1) / kChunk;
  const int parts = std::clamp(threads, 1, int(std::min<size_t>(chunks / kChunksPerThread + 1, 1024)));
  std::vector<Lanes> lanes(chunks);
  in_parts(parts, [&](int part) {
    const size_t last = chunks * (size_t(part) + 1) / size_t(parts);
    for (size_t c = chunks * size_t(part) / size_t(parts); c < last; ++c)
      lanes[c] = lanes_of(data + c * kChunk, std::min(kChunk, size - c * kChunk));
  });
  uint64_t sum = size;
  for (const Lanes& each : lanes)
    for (uint64_t lane : each) sum = step(sum, lane);
  return sum;
}

}  // namespace sterna
