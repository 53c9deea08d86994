#include "pack.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "numbers.h"
#include "quantize.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "model files and packed weights are little-endian, and so must the processor be"
#endif

namespace sterna {

namespace {

constexpr const char* kNotFinite = "a weight or a scale that is NaN or infinite";
constexpr const char* kTooLarge = "a weight that is too large for the packed format";
constexpr size_t kBytesPerThread = 1 << 20;  // below which another thread costs more than it saves

// One row between its source and its place: what fits the layout, padded to whole groups.
struct Row {
  explicit Row(const Matrix& layout)
      : values(layout.padded_cols()),
        bf16(layout.padded_cols()),
        codes(layout.padded_cols()),
        scales(layout.padded_cols() / layout.scale_group),
        minimums(scales.size()) {
    if (!layout.has_min) std::fill(codes.begin(), codes.end(), uint8_t(layout.quant == Quant::kInt4 ? 8 : 128));
  }

  std::vector<float> values;
  std::vector<uint16_t> bf16;
  std::vector<uint8_t> codes;
  std::vector<float> scales, minimums;
};

bool all_finite(const float* values, size_t count) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) finite &= is_finite(values[i]);
  return finite;
}

const char* decode(const SourceType& source, const Matrix& layout, const uint8_t* from, Row& row) {
  const int per_block = source.block_cols / layout.scale_group;
  for (int b = 0; b < layout.cols / source.block_cols; ++b) {
    source.decode(from + size_t(b) * source.block_bytes, &row.codes[size_t(b) * source.block_cols], &row.scales[size_t(b) * per_block],
                  &row.minimums[size_t(b) * per_block]);
  }
  const bool finite = all_finite(row.scales.data(), row.scales.size()) && (!layout.has_min || all_finite(row.minimums.data(), row.minimums.size()));
  return finite ? nullptr : kNotFinite;
}

const char* quantize(const SourceType& source, const Matrix& layout, const uint8_t* from, Row& row) {
  source.widen(from, layout.cols, row.values.data());
  if (!all_finite(row.values.data(), size_t(layout.cols))) return kNotFinite;
  if (layout.quant == Quant::kBf16) {
    for (int i = 0; i < layout.cols; ++i) row.bf16[i] = float_to_bfloat16(row.values[i]);
    const auto end = row.bf16.begin() + layout.cols;
    return std::any_of(row.bf16.begin(), end, [](uint16_t x) { return (x & 0x7f80) == 0x7f80; }) ? kTooLarge : nullptr;
  }
  for (int g = 0; g < layout.groups(); ++g) {
    const int first = g * kGroup, count = std::min(kGroup, layout.cols - first);
    const bool fits = layout.quant == Quant::kInt8
                          ? quantize_int8(&row.values[first], count, &row.codes[first], &row.scales[g])
                          : quantize_int4(&row.values[first], count, &row.codes[first], &row.scales[g], &row.minimums[g]);
    if (!fits) return kTooLarge;
  }
  return nullptr;
}

void place_quants(const Matrix& layout, const Row& row, int r, uint8_t* block) {
  if (layout.quant == Quant::kBf16) {
    for (int i = 0; i < layout.padded_cols() / 2; ++i) std::memcpy(block + (size_t(i) * kBlockRows + r) * 4, &row.bf16[2 * i], 4);
    return;
  }
  const bool int4 = layout.quant == Quant::kInt4;
  const int vectors = int4 ? 4 : 8;
  for (int g = 0; g < layout.groups(); ++g) {
    const uint8_t* codes = &row.codes[size_t(g) * kGroup];
    for (int j = 0; j < vectors; ++j) {
      uint32_t quad = load<uint32_t>(codes + 4 * j);
      if (int4) quad |= load<uint32_t>(codes + 16 + 4 * j) << 4;
      store(block + (size_t(g) * vectors + j) * 64 + 4 * r, quad);
    }
  }
}

void place_scales(const Matrix& layout, const std::vector<float>& scales, int r, uint8_t* at) {
  for (size_t g = 0; g < scales.size(); ++g) {
    const size_t index = g * kBlockRows + r;
    if (layout.float32_scales) {
      store(at + 4 * index, scales[g]);
    } else {
      store(at + 2 * index, float_to_float16(scales[g]));
    }
  }
}

// Blocks first .. last - 1.
std::optional<PackFault> pack_blocks(const SourceType& source, const Matrix& layout, const uint8_t* rows, uint8_t* out, int first, int last,
                                     Row& row) {
  const size_t row_bytes = size_t(layout.cols / source.block_cols) * source.block_bytes;
  for (int b = first; b < last; ++b) {
    uint8_t* block = out + size_t(b) * layout.block_bytes();
    std::memset(block, 0, layout.block_bytes());
    const int count = std::min(kBlockRows, layout.rows - b * kBlockRows);
    for (int r = 0; r < count; ++r) {
      const int64_t at = int64_t(b) * kBlockRows + r;
      const char* what = (source.is_floats() ? quantize : decode)(source, layout, rows + size_t(at) * row_bytes, row);
      if (what != nullptr) return PackFault{at, what};
      place_quants(layout, row, r, block);
      if (layout.quant == Quant::kBf16) continue;
      place_scales(layout, row.scales, r, block + layout.quant_bytes());
      if (layout.has_min) place_scales(layout, row.minimums, r, block + layout.quant_bytes() + layout.scale_bytes());
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
  std::vector<Row> scratch(parts, Row(layout));
  const auto work = [&](int part) {
    const int first = int(int64_t(layout.blocks()) * part / parts), last = int(int64_t(layout.blocks()) * (part + 1) / parts);
    faults[part] = pack_blocks(source, layout, rows, out, first, last, scratch[part]);
  };
  std::vector<std::thread> others;
  for (int part = 1; part < parts; ++part) {
    try {
      others.emplace_back(work, part);
    } catch (const std::system_error&) {  // no more threads may be made
      work(part);
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
  for (const auto& fault : faults) {
    if (fault) return fault;
  }
  return std::nullopt;
}

}  // namespace sterna
