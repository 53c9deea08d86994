// How weights and activations lie in memory. Every instruction set reads the same layout, so a packed file serves any machine.
//
// A matrix is (rows, cols) = (outputs, inputs), y = W x. It is cut into blocks of 16 rows, stored one after the other; rows are padded with
// zeros to whole blocks, columns to whole groups of 32. Within a block, for the int formats:
//
//   quants   per group of 32 columns. int4: 256 bytes = 4 vectors of 64; in vector j, bytes 4r .. 4r+3 belong to row r of the block; their low
//            nibbles are columns 4j .. 4j+3 of the group, their high nibbles columns 16+4j .. 16+4j+3.
//            int8: 512 bytes = 8 vectors of 64; bytes 4r .. 4r+3 of vector j are columns 4j .. 4j+3 of row r.
//   scales   [groups * 32 / scale_group][16 rows], float16 or float32
//   minimums the same, where has_min
//
// and padding to a multiple of 64 bytes. A weight is d * q + m with has_min, else d * (q - zero), where q is the unsigned number stored (int4:
// 0 .. 15, int8: 0 .. 255) and zero is 8 or 128. For bf16: [padded_cols / 2][16 rows][2 columns] of bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sterna {

constexpr int kBlockRows = 16;
constexpr int kGroup = 32;

enum class Quant : uint8_t { kInt4 = 0, kInt8 = 1, kBf16 = 2 };

struct Matrix {
  Quant quant = Quant::kBf16;
  bool has_min = false;
  bool float32_scales = false;
  uint8_t scale_group = kGroup;  // columns per scale: 32, or 16 (int8 only)
  int32_t rows = 0;
  int32_t cols = 0;
  const uint8_t* data = nullptr;  // aligned to 64

  // `static`-like on purpose: no inline function with external linkage may come out of an object file compiled for one instruction set
  // (CMakeLists.txt); the attribute keeps these from ever being emitted.
#define STERNA_INLINE __attribute__((always_inline)) inline
  STERNA_INLINE int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  STERNA_INLINE int groups() const { return (cols + kGroup - 1) / kGroup; }
  STERNA_INLINE int padded_cols() const { return groups() * kGroup; }
  STERNA_INLINE int padded_rows() const { return blocks() * kBlockRows; }
  STERNA_INLINE size_t quant_bytes() const {  // of a block
    return size_t(groups()) * (quant == Quant::kInt4 ? 256 : quant == Quant::kInt8 ? 512 : 1024);
  }
  STERNA_INLINE size_t scale_bytes() const {  // of a block; minimums take as many
    return quant == Quant::kBf16 ? 0 : size_t(groups()) * (kGroup / scale_group) * kBlockRows * (float32_scales ? 4 : 2);
  }
  STERNA_INLINE size_t block_bytes() const { return (quant_bytes() + scale_bytes() * (has_min ? 2 : 1) + 63) / 64 * 64; }
  STERNA_INLINE size_t bytes() const { return block_bytes() * blocks(); }
  STERNA_INLINE const uint8_t* block(int b) const { return data + size_t(b) * block_bytes(); }
};

// One row of activations for the int formats, its columns padded with zeros to whole groups. Per group of 32: x ~= d * q.
// d = max|x| / 127 (0 for a group of zeros), q = round-half-even(x / d) computed as x * (127 / max|x|).
// Rows of a batch lie `Activations::int8_stride()` bytes apart, each: q int8 [padded_cols] | d float [groups] | s float [groups] |
// n32 int32 [groups] | n16 int32 [2 * groups], with s = d * float(sum of q) and n32, n16 = -(sum of q) over 32 and 16 columns.
// For bf16: padded_cols bfloat16, rounded to nearest even.
struct Activations {
  const uint8_t* data = nullptr;  // aligned to 64
  size_t stride = 0;              // bytes from row to row; a multiple of 64
  int32_t cols = 0;

  STERNA_INLINE static size_t int8_stride(int cols) {
    size_t groups = size_t(cols + kGroup - 1) / kGroup;
    return (groups * (32 + 4 + 4 + 4 + 8) + 63) / 64 * 64;
  }
  STERNA_INLINE static size_t bf16_stride(int cols) { return size_t(cols + kGroup - 1) / kGroup * 64; }
};

}  // namespace sterna
