// Products in plain loops: what they mean.

static float product_bf16(const Matrix& w, const uint8_t* block, int r, const uint8_t* row) {
  const auto* weights = reinterpret_cast<const uint16_t*>(block) + 2 * r;
  const auto* x = reinterpret_cast<const uint16_t*>(row);
  float acc = 0.0f;
  for (int c = 0; c < w.padded_cols(); c += 2, weights += 2 * kBlockRows) {
    acc = __builtin_fmaf(bf16_to_float(weights[1]), bf16_to_float(x[c + 1]), acc);
    acc = __builtin_fmaf(bf16_to_float(weights[0]), bf16_to_float(x[c]), acc);
  }
  return acc;
}

static float product_int(const Matrix& w, const uint8_t* block, int r, const uint8_t* row) {
  const auto* x = reinterpret_cast<const QuantizedGroup*>(row);
  const int parts = kGroup / w.scale_group;
  float acc = 0.0f;
  for (int g = 0; g < w.groups(); ++g, block += w.group_bytes()) {
    const uint8_t* scales = block + w.quant_bytes();
    for (int part = 0; part < parts; ++part) {
      int dot = 0;
      for (int c = part * w.scale_group; c < (part + 1) * w.scale_group; ++c) dot += quant_at(w, block, r, c) * x[g].q[c];
      const int i = part * kBlockRows + r;
      const float d = scale_at(w, scales, i) * x[g].d;
      if (w.has_min) {
        acc = __builtin_fmaf(float(dot), d, acc);
        acc = __builtin_fmaf(scale_at(w, scales + w.scale_bytes(), i), parts == 1 ? x[g].s : x[g].s16[part], acc);
      } else {
        const int z = w.quant == Quant::kInt4 ? x[g].z4 : parts == 1 ? x[g].z8 : x[g].z16[part];
        acc = __builtin_fmaf(float(dot + z), d, acc);
      }
    }
  }
  return acc;
}

static void matmul(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride) {
  for (int b = first_block; b < first_block + num_blocks; ++b)
    for (int row = first_row; row < first_row + num_rows; ++row)
      for (int r = 0; r < kBlockRows; ++r) {
        const uint8_t* activations = x.data + size_t(row) * x.stride;
        y[ptrdiff_t(row) * ptrdiff_t(y_stride) + b * kBlockRows + r] =
            w.quant == Quant::kBf16 ? product_bf16(w, w.block(b), r, activations) : product_int(w, w.block(b), r, activations);
      }
}

static void fill_matmul(Kernels& k) { k.matmul = matmul; }
