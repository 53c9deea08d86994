// Activations as the matrix products take them, and rows of a matrix as float32.

constexpr float kLeastMaximum = 0x1p-118f;

// The first `count` (more than 32: 32) of x as a group, the others as zeros.
static void quantize_group(const float* x, int count, ActivationGroup& out) {
  const Lanes half[2] = {count >= 16 ? load(x) : load(x, count), count >= 32 ? load(x + 16) : load(x + 16, count > 16 ? count - 16 : 0)};
  const float maximum = reduce_max(max(abs(half[0]), abs(half[1])));
  const bool finite = bits(unordered(half[0], half[1])) == 0 && maximum < kInfinity;
  const bool counts = finite && maximum >= kLeastMaximum;
  const float d = counts ? maximum / 127.0f : finite ? 0.0f : __builtin_nanf("");
  const Lanes factor = set1(127.0f / maximum);
  int32_t sums[2];
  for (int i = 0; i < 2; i++) {
    const Lanes q = counts ? round_even(mul(half[i], factor)) : zero();
    store_int8(out.q + 16 * i, q);
    sums[i] = int32_t(reduce_add(q));  // of integers: exact
    out.s16[i] = d * float(sums[i]);
    out.zero_int8_16[i] = -128 * sums[i];
  }
  out.d = d;
  out.s = d * float(sums[0] + sums[1]);
  out.zero_int4 = -8 * (sums[0] + sums[1]);
  out.zero_int8 = -128 * (sums[0] + sums[1]);
}

#if defined(STERNA_LANES_AVX512)
#include "quantize_avx512.inl"
#endif

static void quantize(const float* x, int cols, uint8_t* groups) {
  ActivationGroup* out = reinterpret_cast<ActivationGroup*>(groups);
  int column = 0;
#if defined(STERNA_LANES_AVX512)
  for (; column + 2 * kGroup <= cols; column += 2 * kGroup, out += 2) {
    if (quantize_two(x + column, out)) continue;
    for (int i = 0; i < 2; i++) quantize_group(x + column + i * kGroup, kGroup, out[i]);
  }
#endif
  for (; column < cols; column += kGroup) quantize_group(x + column, cols - column, *out++);
}

static void refine(const float* x, int cols, uint8_t* row) {
  const int groups = (cols + kGroup - 1) / kGroup, most = most_refined(groups);
  const ActivationGroup* of = reinterpret_cast<const ActivationGroup*>(row);
  ActivationGroup* refinement = reinterpret_cast<ActivationGroup*>(row) + groups;
  int32_t* refined = Activations::refined(row, cols);
  float squares = 0.0f;
  for (int g = 0; g < groups; g++) squares += of[g].d * of[g].d;
  const float limit = squares / float(groups) * float(kRefineAbove);
  int count = 0;
  for (int g = 0; g < groups && count < most; g++) {
    if (!(of[g].d * of[g].d > limit)) continue;
    const int columns = cols - g * kGroup < kGroup ? cols - g * kGroup : kGroup;
    float rest[kGroup];
    for (int c = 0; c < columns; c++) rest[c] = x[g * kGroup + c] - of[g].d * float(of[g].q[c]);
    quantize_group(rest, columns, refinement[count]);
    refined[count++] = g;
  }
  refined[count] = kNoGroup;
}

static void to_bf16(const float* x, int cols, uint8_t* row) {
  uint16_t* out = reinterpret_cast<uint16_t*>(row);
  int column = 0;
  for (; column + 16 <= cols; column += 16) store_halves(out + column, narrow(load(x + column)));
  for (; column < (cols + kGroup - 1) / kGroup * kGroup; column += 16) {
    store_halves(out + column, narrow(load(x + column, column < cols ? cols - column : 0)));
  }
}

static uint32_t load_u32(const uint8_t* p) {
  uint32_t u;
  __builtin_memcpy(&u, p, 4);
  return u;
}
static uint16_t load_u16(const uint8_t* p) {
  uint16_t u;
  __builtin_memcpy(&u, p, 2);
  return u;
}
static float float_from(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// float16 to float32, exact: subnormals, infinities and NaN included.
static float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
  if (exponent == 31) return float_from(sign | 0x7f800000u | fraction << 13);
  if (exponent > 0) return float_from(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// Scale (or minimum) number `row` of those at p.
static float scale_at(const uint8_t* p, bool float32, int row) {
  return float32 ? float_from(load_u32(p + 4 * row)) : half_to_float(load_u16(p + 2 * row));
}

static int code_at(const uint8_t* group, Quant quant, int row, int column) {
  if (quant == Quant::kInt8) return group[column / 4 * 64 + 4 * row + column % 4];
  const uint8_t both = group[column / 4 % 4 * 64 + 4 * row + column % 4];
  return column < 16 ? both & 15 : both >> 4;
}

static void dequantize_row(const Matrix& w, int row, float* out) {
  const uint8_t* group = w.block(row / kBlockRows);
  const int r = row % kBlockRows, zero_point = w.quant == Quant::kInt4 ? 8 : 128;
  for (int g = 0; g < w.groups(); g++, group += w.group_bytes(), out += kGroup) {
    for (int c = 0; c < kGroup; c++) {
      if (w.quant == Quant::kBf16) {
        out[c] = float_from(uint32_t(load_u16(group + c / 2 * 64 + 4 * r + c % 2 * 2)) << 16);
        continue;
      }
      const int scale = c / w.scale_group, code = code_at(group, w.quant, r, c);
      const uint8_t* scales = group + w.quant_bytes();
      const float d = scale_at(scales, w.float32_scales, scale * kBlockRows + r);
      if (w.has_min) {
        out[c] = __builtin_fmaf(d, float(code), scale_at(scales + w.scale_bytes(), w.float32_scales, scale * kBlockRows + r));
      } else {
        out[c] = d * float(code - zero_point);
      }
    }
  }
  for (int c = w.cols - w.padded_cols(); c < 0; c++) out[c] = 0.0f;
}

static void fill_activations(Kernels& k) {
  k.quantize = quantize;
  k.refine = refine;
  k.to_bf16 = to_bf16;
  k.dequantize_row = dequantize_row;
}
