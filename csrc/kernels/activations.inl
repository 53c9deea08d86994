// Activations into the forms that products take, and rows of weights back into floats.

static void quantize(const float* x, int cols, uint8_t* row) {
  auto* group = reinterpret_cast<QuantizedGroup*>(row);
  for (int c = 0; c < cols; c += kGroup, ++group) {
    const int low = cols - c < 16 ? cols - c : 16, high = cols - c < 16 ? 0 : cols - c < 32 ? cols - c - 16 : 16;
    const Lanes a = load(x + c, low), b = load(x + c + low, high);
    const bool bad = bits(unordered(sub(a, a), sub(b, b))) != 0;
    const float largest = bad ? 0.0f : reduce_max(max(abs(a), abs(b)));
    const bool empty = !(largest >= 0x1p-118f);
    const Lanes inverse = set1(empty ? 0.0f : 127.0f / largest);
    store_int8(group->q, bad ? zero() : round_even(mul(a, inverse)));
    store_int8(group->q + 16, bad ? zero() : round_even(mul(b, inverse)));
    int sums[2] = {0, 0};
    for (int i = 0; i < 32; ++i) sums[i / 16] += group->q[i];
    const int sum = sums[0] + sums[1];
    group->d = bad ? __builtin_nanf("") : empty ? 0.0f : largest / 127.0f;
    group->s = group->d * float(sum);
    group->z4 = -8 * sum;
    group->z8 = -128 * sum;
    for (int i = 0; i < 2; ++i) {
      group->s16[i] = group->d * float(sums[i]);
      group->z16[i] = -128 * sums[i];
    }
  }
}

static void to_bf16(const float* x, int cols, uint8_t* row) {
  auto* out = reinterpret_cast<uint16_t*>(row);
  const int padded = (cols + kGroup - 1) / kGroup * kGroup;
  for (int c = 0; c < padded; c += kLanes) {
    const int count = cols - c < 0 ? 0 : cols - c < kLanes ? cols - c : kLanes;
    store_halves(out + c, narrow(load(x + c, count)));
  }
}

// Exact, and without instructions that not every processor has.
static float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  uint32_t bits = sign;
  if (exponent == 31)
    bits |= 0x7f800000 | mantissa << 13;
  else if (exponent != 0)
    bits |= (exponent + 112) << 23 | mantissa << 13;
  else if (mantissa != 0) {
    const int shift = __builtin_clz(mantissa) - 21;
    bits |= uint32_t(113 - shift) << 23 | (mantissa << shift & 1023) << 13;
  }
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static float scale_at(const Matrix& w, const uint8_t* scales, int i) {
  if (w.float32_scales) {
    float value;
    __builtin_memcpy(&value, scales + 4 * i, 4);
    return value;
  }
  uint16_t half;
  __builtin_memcpy(&half, scales + 2 * i, 2);
  return half_to_float(half);
}

// The number stored for a column of a group and a row of its block.
static int quant_at(const Matrix& w, const uint8_t* group, int row, int col) {
  if (w.quant == Quant::kInt8) return group[col / 4 * 64 + 4 * row + col % 4];
  const uint8_t both = group[col % 16 / 4 * 64 + 4 * row + col % 4];
  return col < 16 ? both & 15 : both >> 4;
}

static float bf16_to_float(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static void dequantize_row(const Matrix& w, int row, float* out) {
  const uint8_t* block = w.block(row / kBlockRows);
  const int r = row % kBlockRows, zero = w.quant == Quant::kInt4 ? 8 : 128;
  for (int c = 0; c < w.padded_cols(); ++c) {
    const uint8_t* group = block + size_t(c / kGroup) * w.group_bytes();
    const int col = c % kGroup;
    if (c >= w.cols) {
      out[c] = 0.0f;
    } else if (w.quant == Quant::kBf16) {
      uint16_t half;
      __builtin_memcpy(&half, group + col / 2 * 64 + r * 4 + col % 2 * 2, 2);
      out[c] = bf16_to_float(half);
    } else {
      const uint8_t* scales = group + w.quant_bytes();
      const int i = col / w.scale_group * kBlockRows + r, q = quant_at(w, group, r, col);
      const float d = scale_at(w, scales, i);
      out[c] = w.has_min ? __builtin_fmaf(d, float(q), scale_at(w, scales + w.scale_bytes(), i)) : d * float(q - zero);
    }
  }
}

static void fill_activations(Kernels& k) {
  k.quantize = quantize;
  k.to_bf16 = to_bf16;
  k.dequantize_row = dequantize_row;
}
