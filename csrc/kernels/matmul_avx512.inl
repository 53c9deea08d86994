// Products with VNNI: 16 rows of a block are the lanes, four columns of each one 32-bit element, so one instruction adds 64 products.

// What a kernel is compiled for: the format, and how many rows of activations it takes at once.
template <Quant kQuant, bool kHasMin, bool kFloat32, int kScaleGroup>
struct IntFormat {
  static constexpr bool has_min = kHasMin;
  static constexpr int parts = kGroup / kScaleGroup;
  static constexpr int quant_bytes = kQuant == Quant::kInt4 ? 256 : 512;
  static constexpr int scale_bytes = kBlockRows * (kFloat32 ? 4 : 2);  // of one part
  static constexpr int group_bytes = quant_bytes + scale_bytes * parts * (kHasMin ? 2 : 1);

  STERNA_INLINE static void load_quants(const uint8_t* group, __m512i (&v)[8]) {
    if constexpr (kQuant == Quant::kInt4) {
      const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_loadu_si512(group + 64 * j);
        v[j] = _mm512_and_si512(both, low);
        v[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) v[j] = _mm512_loadu_si512(group + 64 * j);
    }
  }
  STERNA_INLINE static __m512 load_scales(const uint8_t* scales) {
    if constexpr (kFloat32) return _mm512_loadu_ps(scales);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
  }
  // Where the integer sum starts.
  STERNA_INLINE static __m512i start(const QuantizedGroup& x, int part) {
    if constexpr (kHasMin) return _mm512_setzero_si512();
    if constexpr (kQuant == Quant::kInt4) return _mm512_set1_epi32(x.z4);
    return _mm512_set1_epi32(parts == 1 ? x.z8 : x.z16[part]);
  }
};

template <class F, int kRows>
__attribute__((noinline)) static void int_block(const uint8_t* block, int groups, const uint8_t* x, size_t stride, float* y, ptrdiff_t y_stride) {
  __m512 acc[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, block += F::group_bytes, x += sizeof(QuantizedGroup)) {
    if constexpr (kRows <= 8) {
      // Memory, not arithmetic, is what few rows wait for.
#pragma GCC unroll 10
      for (int i = 0; i < F::group_bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(block) + 2560 + i, _MM_HINT_T0);
    }
    __m512i v[8];
    F::load_quants(block, v);
    const uint8_t* scales = block + F::quant_bytes;
#pragma GCC unroll 2
    for (int part = 0; part < F::parts; ++part) {
      const __m512 d = F::load_scales(scales + part * F::scale_bytes);
      const __m512 m = F::has_min ? F::load_scales(scales + (F::parts + part) * F::scale_bytes) : d;
      constexpr int kVectors = 8 / F::parts;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const auto& group = *reinterpret_cast<const QuantizedGroup*>(x + r * stride);
        const auto* q = reinterpret_cast<const int32_t*>(group.q) + part * kVectors;
        __m512i dot = F::start(group, part);
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) dot = _mm512_dpbusd_epi32(dot, v[part * kVectors + j], _mm512_set1_epi32(q[j]));
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, _mm512_set1_ps(group.d)), acc[r]);
        if constexpr (F::has_min) acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(F::parts == 1 ? group.s : group.s16[part]), acc[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + r * y_stride, acc[r]);
}

// kBlocks blocks at once, for with few rows a chain of products is too slow alone.
template <int kRows, int kBlocks>
__attribute__((noinline)) static void bf16_blocks(
    const uint8_t* block, size_t block_bytes, int pairs, const uint8_t* x, size_t stride, float* y, ptrdiff_t y_stride) {
  Lanes acc[kRows][kBlocks];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) acc[r][b] = zero();
  for (int p = 0; p < pairs; ++p, block += 64, x += 4) {
    Pairs w[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      w[b] = load_pairs(block + b * block_bytes);
      if constexpr (kRows <= 4) _mm_prefetch(reinterpret_cast<const char*>(block) + b * block_bytes + 2048, _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Pairs q = set1_pairs(reinterpret_cast<const uint16_t*>(x + r * stride));
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) acc[r][b] = dot_pairs(acc[r][b], w[b], q);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) store(y + r * y_stride + b * kBlockRows, acc[r][b]);
}

// The columns of one call: rows by eights, then the rest.
template <class F>
static void int_matmul(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride) {
  const ptrdiff_t stride = ptrdiff_t(y_stride);
  for (int b = first_block; b < first_block + num_blocks; ++b) {
    const int end = first_row + num_rows;
    int row = first_row;
    auto run = [&](auto kernel, int rows) {
      for (; row + rows <= end; row += rows)
        kernel(w.block(b), w.groups(), x.data + size_t(row) * x.stride, x.stride, y + row * stride + b * kBlockRows, stride);
    };
    run(int_block<F, 8>, 8);
    run(int_block<F, 4>, 4);
    run(int_block<F, 2>, 2);
    run(int_block<F, 1>, 1);
  }
}

static void bf16_matmul(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride) {
  const ptrdiff_t stride = ptrdiff_t(y_stride);
  const int end = first_row + num_rows, last = first_block + num_blocks;
  auto run = [&](auto kernel, int& row, int rows, int b) {
    for (; row + rows <= end; row += rows)
      kernel(w.block(b), w.block_bytes(), w.padded_cols() / 2, x.data + size_t(row) * x.stride, x.stride, y + row * stride + b * kBlockRows, stride);
  };
  int b = first_block;
  for (; b + 2 <= last; b += 2) {
    int row = first_row;
    run(bf16_blocks<12, 2>, row, 12, b);
    run(bf16_blocks<6, 2>, row, 6, b);
    run(bf16_blocks<3, 2>, row, 3, b);
    run(bf16_blocks<1, 2>, row, 1, b);
  }
  for (; b < last; ++b) {
    int row = first_row;
    run(bf16_blocks<12, 1>, row, 12, b);
    run(bf16_blocks<4, 1>, row, 4, b);
    run(bf16_blocks<1, 1>, row, 1, b);
  }
}

static void matmul(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride) {
  auto run = [&](auto kernel) { kernel(w, x, first_row, num_rows, first_block, num_blocks, y, y_stride); };
  constexpr Quant kInt4 = Quant::kInt4, kInt8 = Quant::kInt8;
  if (w.quant == Quant::kBf16) return run(bf16_matmul);
  const int form = (w.quant == kInt8) << 3 | (w.scale_group == 16) << 2 | w.has_min << 1 | int(w.float32_scales);
  switch (form) {
    case 0: return run(int_matmul<IntFormat<kInt4, false, false, 32>>);
    case 1: return run(int_matmul<IntFormat<kInt4, false, true, 32>>);
    case 2: return run(int_matmul<IntFormat<kInt4, true, false, 32>>);
    case 3: return run(int_matmul<IntFormat<kInt4, true, true, 32>>);
    case 8: return run(int_matmul<IntFormat<kInt8, false, false, 32>>);
    case 9: return run(int_matmul<IntFormat<kInt8, false, true, 32>>);
    case 10: return run(int_matmul<IntFormat<kInt8, true, false, 32>>);
    case 11: return run(int_matmul<IntFormat<kInt8, true, true, 32>>);
    case 12: return run(int_matmul<IntFormat<kInt8, false, false, 16>>);
    case 13: return run(int_matmul<IntFormat<kInt8, false, true, 16>>);
    case 14: return run(int_matmul<IntFormat<kInt8, true, false, 16>>);
    default: return run(int_matmul<IntFormat<kInt8, true, true, 16>>);
  }
}

static void fill_matmul(Kernels& k) { k.matmul = matmul; }
