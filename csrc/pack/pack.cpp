#include "pack.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"
#include "parts.h"
#include "quantize.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "model files and packed weights are little-endian, and so must the processor be"
#endif

namespace sterna {

namespace {

constexpr const char* kNotFinite = "a weight or a scale that is NaN or infinite";
constexpr const char* kTooLarge = "a weight that is too large for the packed format";
constexpr size_t kBytesPerThread = 1 << 20;  // below which another thread costs more than it saves

// The rows of one block between their source and their place, each padded to whole groups.
struct Rows {
  explicit Rows(const Matrix& layout)
      : stride(size_t(layout.padded_cols())),
        scale_stride(stride / layout.scale_group),
        values(stride),
        bf16(layout.quant == Quant::kBf16 ? kBlockRows * stride : 0),
        codes(layout.quant == Quant::kBf16 ? 0 : kBlockRows * stride),
        scales(kBlockRows * scale_stride),
        minimums(kBlockRows * scale_stride) {}

  size_t stride, scale_stride;
  std::vector<float> values;  // of one row of floats
  std::vector<uint16_t> bf16;
  std::vector<uint8_t> codes;
  std::vector<float> scales, minimums;
};

const char* decode(const SourceType& source, const Matrix& layout, const uint8_t* from, int r, Rows& rows) {
  const int per_block = source.block_cols / layout.scale_group;
  uint8_t* codes = &rows.codes[r * rows.stride];
  float *const scales = &rows.scales[r * rows.scale_stride], *const minimums = &rows.minimums[r * rows.scale_stride];
  for (int b = 0; b < layout.cols / source.block_cols; ++b) {
    source.decode(from + size_t(b) * source.block_bytes, codes + b * source.block_cols, scales + b * per_block, minimums + b * per_block);
  }
  const bool finite = all_finite(scales, rows.scale_stride) && (!layout.has_min || all_finite(minimums, rows.scale_stride));
  return finite ? nullptr : kNotFinite;
}

const char* round_to_bfloat16(const Matrix& layout, int r, Rows& rows) {
  uint16_t* out = &rows.bf16[r * rows.stride];
  uint16_t most = 0;
  for (int i = 0; i < layout.cols; ++i) {
    out[i] = float_to_bfloat16(rows.values[i]);
    most = std::max(most, uint16_t(out[i] & 0x7f80));
  }
  return most == 0x7f80 ? kTooLarge : nullptr;
}

const char* quantize(const SourceType& source, const Matrix& layout, const uint8_t* from, int r, Rows& rows) {
  source.widen(from, layout.cols, rows.values.data());
  if (!all_finite(rows.values.data(), size_t(layout.cols))) return kNotFinite;
  if (layout.quant == Quant::kBf16) return round_to_bfloat16(layout, r, rows);
  // A group that isn't whole is filled up with its own numbers, again and again: they weigh alike, and padding has no influence.
  for (int i = layout.cols, tail = layout.cols % kGroup; i < layout.padded_cols(); ++i) rows.values[i] = rows.values[i - tail];
  for (int g = 0; g < layout.groups(); ++g) {
    const float* values = &rows.values[size_t(g) * kGroup];
    uint8_t* codes = &rows.codes[r * rows.stride + size_t(g) * kGroup];
    float *scale = &rows.scales[r * rows.scale_stride + g], *minimum = &rows.minimums[r * rows.scale_stride + g];
    const bool fits = layout.quant == Quant::kInt8 ? quantize_int8(values, codes, scale) : quantize_int4(values, codes, scale, minimum);
    if (!fits) return kTooLarge;
  }
  const uint8_t zero = layout.quant == Quant::kInt8 ? 128 : 0;
  std::fill(&rows.codes[r * rows.stride + layout.cols], &rows.codes[r * rows.stride] + rows.stride, zero);
  return nullptr;
}

void place_bf16(const Rows& rows, int count, uint8_t* block) {
  for (size_t i = 0; i < rows.stride; i += 2, block += 64) {
    for (int r = 0; r < count; ++r) std::memcpy(block + 4 * r, &rows.bf16[r * rows.stride + i], 4);
  }
}

// The codes of one group: vectors of 64 bytes, in each four bytes of every row in turn. Returns where they end.
uint8_t* place_codes(bool int4, const Rows& rows, size_t first_col, int count, uint8_t* at) {
  for (int quad = 0; quad < (int4 ? 16 : 32); quad += 4, at += 64) {
    for (int r = 0; r < count; ++r) {
      const uint8_t* codes = &rows.codes[r * rows.stride + first_col + quad];
      uint32_t four = load<uint32_t>(codes);
      if (int4) four |= load<uint32_t>(codes + 16) << 4;
      store(at + 4 * r, four);
    }
  }
  return at;
}

// Scales or minimums `first` .. `first + many - 1` of each row. Returns where they end.
uint8_t* place_scales(bool float32, const Rows& rows, const std::vector<float>& scales, size_t first, int many, int count, uint8_t* at) {
  const int size = float32 ? 4 : 2;
  for (size_t s = first; s < first + many; ++s, at += size * kBlockRows) {
    for (int r = 0; r < count; ++r) {
      const float scale = scales[r * rows.scale_stride + s];
      if (float32) {
        store(at + 4 * r, scale);
      } else {
        store(at + 2 * r, float_to_float16(scale));
      }
    }
  }
  return at;
}

// Returns where the block's content ends.
uint8_t* place_groups(const Matrix& layout, const Rows& rows, int count, uint8_t* at) {
  const int many = kGroup / layout.scale_group;
  for (int g = 0; g < layout.groups(); ++g) {
    at = place_codes(layout.quant == Quant::kInt4, rows, size_t(g) * kGroup, count, at);
    at = place_scales(layout.float32_scales, rows, rows.scales, size_t(g) * many, many, count, at);
    if (layout.has_min) at = place_scales(layout.float32_scales, rows, rows.minimums, size_t(g) * many, many, count, at);
  }
  return at;
}

// Blocks first .. last - 1.
std::optional<PackFault> pack_blocks(const SourceType& source, const Matrix& layout, const uint8_t* from, uint8_t* out, int first, int last,
                                     Rows& rows) {
  const size_t row_bytes = size_t(layout.cols / source.block_cols) * source.block_bytes;
  for (int b = first; b < last; ++b) {
    const int count = std::min(kBlockRows, layout.rows - b * kBlockRows);
    for (int r = 0; r < count; ++r) {
      const int64_t at = int64_t(b) * kBlockRows + r;
      const char* what = (source.is_floats() ? quantize : decode)(source, layout, from + size_t(at) * row_bytes, r, rows);
      if (what != nullptr) return PackFault{at, what};
    }
    uint8_t* block = out + size_t(b) * layout.block_bytes();
    if (count < kBlockRows) std::memset(block, 0, layout.block_bytes());
    if (layout.quant == Quant::kBf16) {
      place_bf16(rows, count, block);
    } else {
      uint8_t* end = place_groups(layout, rows, count, block);
      std::memset(end, 0, size_t(block + layout.block_bytes() - end));
    }
  }
  return std::nullopt;
}

bool same(const Format& a, const Format& b) {
  return a.quant == b.quant && a.has_min == b.has_min && a.float32_scales == b.float32_scales && a.scale_group == b.scale_group;
}

}  // namespace

bool can_pack(const SourceType& source, const Format& format) {
  if (!source.is_floats()) return same(format, source.format);
  return same(format, {Quant::kBf16}) || same(format, {Quant::kInt8, false, false, 32}) || same(format, {Quant::kInt4, true, false, 32});
}

Matrix layout_of(const Format& format, int64_t rows, int64_t cols) {
  // A size whose padding is no int32 either has no place in `Matrix`.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kGroup;
  if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
    throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + " can't be packed");
  }
  const bool groups_right = format.scale_group == 32 || (format.scale_group == 16 && format.quant == Quant::kInt8);
  const bool plain = !format.has_min && !format.float32_scales;
  if (!groups_right || (format.quant == Quant::kBf16 && !plain)) throw std::invalid_argument("the layout has no such format");
  Matrix layout;
  layout.quant = format.quant;
  layout.has_min = format.has_min;
  layout.float32_scales = format.float32_scales;
  layout.scale_group = uint8_t(format.scale_group);
  layout.rows = int32_t(rows);
  layout.cols = int32_t(cols);
  return layout;
}

std::optional<PackFault> pack_rows(const SourceType& source, const Matrix& layout, const uint8_t* rows, uint8_t* out, int threads) {
  const int useful = int(std::min<size_t>(layout.bytes() / kBytesPerThread + 1, size_t(layout.blocks())));
  const int parts = std::clamp(threads, 1, useful);
  std::vector<std::optional<PackFault>> faults(parts);
  std::vector<Rows> scratch(parts, Rows(layout));
  in_parts(parts, [&](int part) {
    const int first = int(int64_t(layout.blocks()) * part / parts), last = int(int64_t(layout.blocks()) * (part + 1) / parts);
    faults[part] = pack_blocks(source, layout, rows, out, first, last, scratch[part]);
  });
  for (const auto& fault : faults) {
    if (fault) return fault;
  }
  return std::nullopt;
}

}  // namespace sterna
