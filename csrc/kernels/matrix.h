// How weights and activations lie in memory. Every instruction set reads the same layout, so a packed file serves any machine.
//
// A matrix is (rows, cols) = (outputs, inputs), y = W x. It is cut into blocks of 16 rows, stored one after the other; rows are padded with
// zeros to whole blocks, columns to whole groups of 32. Within a block, for the int formats, group after group (so that a block is one stream of
// reading), each:
//
//   quants   int4: 256 bytes = 4 vectors of 64; in vector j, bytes 4r .. 4r+3 belong to row r of the block; their low nibbles are columns
//            4j .. 4j+3 of the group, their high nibbles columns 16+4j .. 16+4j+3.
//            int8: 512 bytes = 8 vectors of 64; bytes 4r .. 4r+3 of vector j are columns 4j .. 4j+3 of row r.
//   scales   [32 / scale_group][16 rows], float16 or float32
//   minimums the same, where has_min
//
// and at its end padding to a multiple of 64 bytes. A weight is d * q + m with has_min, else d * (q - zero), where q is the unsigned number stored
// (int4: 0 .. 15, int8: 0 .. 255) and zero is 8 or 128. For bf16 a block is [padded_cols / 2][16 rows][2 columns] of bfloat16.
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
  STERNA_INLINE size_t quant_bytes() const { return quant == Quant::kInt4 ? 256 : quant == Quant::kInt8 ? 512 : 1024; }  // of a group
  STERNA_INLINE size_t scale_bytes() const {  // of a group; minimums take as many
    return quant == Quant::kBf16 ? 0 : size_t(kGroup / scale_group) * kBlockRows * (float32_scales ? 4 : 2);
  }
  STERNA_INLINE size_t group_bytes() const { return quant_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  STERNA_INLINE size_t block_bytes() const { return (groups() * group_bytes() + 63) / 64 * 64; }
  STERNA_INLINE size_t bytes() const { return block_bytes() * blocks(); }
  STERNA_INLINE const uint8_t* block(int b) const { return data + size_t(b) * block_bytes(); }
};

// One group of 32 of a row of activations for the int formats: x ~= d * q, one cache line. Columns behind the row's end are zeros.
// d = max|x| / 127, q = round-half-even(x * (127 / max|x|)). A group with max|x| < 2^-118 is zeros, d included (so that neither quotient leaves
// float32's normal numbers). A group that has a NaN or an infinity has d = NaN and q = 0: its row's outputs are NaN, and no other's.
struct alignas(64) ActivationGroup {
  int8_t q[kGroup];
  float d;
  float s;       // d * float(sum of q)
  float s16[2];  // the same over the halves, columns 0 .. 15 and 16 .. 31
  int32_t zero_int4;        // -8 * sum of q: what the zero point of an int4 weight adds to the dot product
  int32_t zero_int8;        // -128 * sum of q
  int32_t zero_int8_16[2];  // -128 * sum of q over the halves
};

// In the stream between layers a few channels are many times larger than all others; a group that holds one is rounded as coarsely, and such groups
// make most of a row's error. So in rows that are refined (others end their list of refinements at once) a group whose d^2 is more than kRefineAbove
// times the row's mean of d^2 is: what rounding left over of it (x - d * q, two roundings) is quantized as a group once more, and adds to the dot
// product as one. The mean is (sum of d^2, ascending) / groups, in float32; d^2 or a sum beyond float32 refines nothing, nor does a NaN. Fewer than
// groups / kRefineAbove can be so large.
constexpr int kRefineAbove = 4;
constexpr int32_t kNoGroup = 0x7fffffff;

STERNA_INLINE constexpr int most_refined(int groups) { return groups / kRefineAbove; }

// A batch of rows. int formats: [groups] ActivationGroup, [most_refined(groups)] refinements, of which those used come first, by ascending group, and
// int32 [most_refined(groups) + 1] the groups that they refine, with kNoGroup behind the last. bf16: padded_cols bfloat16, rounded to nearest even,
// subnormals as zero. Rows lie an odd number of cache lines apart, or else those of a power of two of columns would all meet in one set of the cache.
struct Activations {
  const uint8_t* data = nullptr;  // aligned to 64
  size_t stride = 0;              // bytes from row to row
  int32_t cols = 0;

  // The row's groups that are refined.
  STERNA_INLINE static int32_t* refined(uint8_t* int8_row, int cols) {
    const int groups = (cols + kGroup - 1) / kGroup;
    return reinterpret_cast<int32_t*>(int8_row + size_t(groups + most_refined(groups)) * sizeof(ActivationGroup));
  }
  STERNA_INLINE static size_t int8_stride(int cols) {
    const int groups = (cols + kGroup - 1) / kGroup, refined = most_refined(groups);
    const size_t lines = size_t(groups + refined) + (size_t(refined + 1) * sizeof(int32_t) + 63) / 64;
    return (lines | 1) * 64;
  }
  STERNA_INLINE static size_t bf16_stride(int cols) { return (size_t(cols + kGroup - 1) / kGroup | 1) * 64; }
};

}  // namespace sterna
