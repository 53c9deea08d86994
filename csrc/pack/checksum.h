// A checksum of packed weights, against disks and copies that change them: at the speed of memory, and no defence against anybody who means to.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sterna {

// 64 bits, the same on every machine and for any number of threads. Bytes that differ in one aligned word of 8 always give another checksum; others give
// the same by chance, once in 2^64.
//
// Of each MiB (the last may be less, and is taken as if filled up with zeros to a multiple of 64): eight lanes, lane i starting from kLane * (i + 1) and taking
// the words i, i + 8, ... (little-endian) by lane = rotate_left(lane ^ word, 29) * kMultiplier. Then, starting from the number of bytes of all, the lanes in
// order, MiB by MiB: sum = rotate_left(sum ^ lane, 29) * kMultiplier. All modulo 2^64.
uint64_t checksum(const uint8_t* data, size_t size, int threads);

}  // namespace sterna
