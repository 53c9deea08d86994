// Matrix products in plain loops: what they mean.
#include "matmul_forms.inl"

template <class F>
struct PortableRows {
  static constexpr int kZero = F::kHasMin ? 0 : F::kQuant == Quant::kInt4 ? 8 : 128;

  // A group of a block. Codes (less the zero point) are floats: a sum of their products with activations stays below 2^24, so floats hold it exactly
  // and every processor has the vectors for it.
  struct Weights {
    float codes[kGroup][kBlockRows];
    float d[F::kScales][kBlockRows], m[F::kScales][kBlockRows];

    explicit Weights(const uint8_t* group) {
      for (int c = 0; c < kGroup; c++) {
        for (int i = 0; i < kBlockRows; i++) codes[c][i] = float(code_at(group, F::kQuant, i, c) - kZero);
      }
      for (int scale = 0; scale < F::kScales; scale++) {
        for (int i = 0; i < kBlockRows; i++) d[scale][i] = scale_at(F::scales(group, scale), F::kFloat32, i);
        for (int i = 0; i < kBlockRows; i++) m[scale][i] = F::kHasMin ? scale_at(F::minimums(group, scale), F::kFloat32, i) : 0.0f;
      }
    }

    void add_to(float* acc, const ActivationGroup& x) const {
      for (int scale = 0; scale < F::kScales; scale++) {
        float dot[kBlockRows] = {};
        for (int c = scale * F::kScaleGroup; c < (scale + 1) * F::kScaleGroup; c++) {
          for (int i = 0; i < kBlockRows; i++) dot[i] += codes[c][i] * float(x.q[c]);
        }
        for (int i = 0; i < kBlockRows; i++) {
          acc[i] = __builtin_fmaf(dot[i], d[scale][i] * x.d, acc[i]);
          if (F::kHasMin) acc[i] = __builtin_fmaf(m[scale][i], F::sum(x, scale), acc[i]);
        }
      }
    }
  };

  static void run(const Product& p, int rows) {
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      for (int row = 0; row < rows; row++) __builtin_memset(p.out(row, block), 0, kBlockRows * sizeof(float));
      const uint8_t* group = p.w.block(block);
      for (int g = 0; g < p.w.groups(); g++, group += F::kGroupBytes) {
        const Weights weights(group);
        for (int row = 0; row < rows; row++) weights.add_to(p.out(row, block), p.ints(row)[g]);
      }
      for (int row = 0; row < rows; row++) {
        const ActivationGroup* refinement = p.refinements(row);
        for (const int32_t* g = p.refined(row); *g != kNoGroup; g++, refinement++) {
          Weights(p.w.block(block) + size_t(*g) * F::kGroupBytes).add_to(p.out(row, block), *refinement);
        }
      }
    }
  }
};

// fma(a, b, c) for bfloat16 a and b. Without an instruction for it the float64 sum rounds to the same: the product has 16 bits, so that sum is
// inexact only where one term is too small to reach the other's rounding.
STERNA_INLINE float fused_bf16(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return float(double(a) * double(b) + double(c));
#endif
}

template <>
struct PortableRows<Bf16Form> {
  static float number(const uint8_t* p, int i) { return float_from(uint32_t(load_u16(p + 2 * i)) << 16); }

  static void run(const Product& p, int rows) {
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      for (int row = 0; row < rows; row++) {
        float acc[kBlockRows] = {};
        const uint8_t *pair = p.w.block(block), *x = p.x + row * p.x_stride;
        for (int c = 0; c < p.w.padded_cols(); c += 2, pair += 64, x += 4) {
          const float even = number(x, 0), odd = number(x, 1);
          for (int i = 0; i < kBlockRows; i++) {
            acc[i] = fused_bf16(number(pair, 2 * i), even, fused_bf16(number(pair, 2 * i + 1), odd, acc[i]));
          }
        }
        __builtin_memcpy(p.out(row, block), acc, sizeof acc);
      }
    }
  }
};

static void fill_matmul(Kernels& k) { k.matmul = matmul_by_form<PortableRows>; }
