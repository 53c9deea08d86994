// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), as src/sterna/executor/philox.py defines it for
// sampling: the noise of token t at output index i comes from word t % 4 of the block with counter (t / 4, i, 0, 0).
#pragma once

#include "matrix.h"

namespace sterna {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9, kPhiloxKeyStep1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

struct PhiloxStream {
  uint32_t key[2];        // the seed's low and high half
  uint32_t output_index;  // which token of the output is drawn
};

STERNA_INLINE void philox_block(const PhiloxStream& stream, uint32_t block, uint32_t words[4]) {
  uint32_t c0 = block, c1 = stream.output_index, c2 = 0, c3 = 0, k0 = stream.key[0], k1 = stream.key[1];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t(kPhiloxMultiplier0) * c0, p1 = uint64_t(kPhiloxMultiplier1) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

}  // namespace sterna
