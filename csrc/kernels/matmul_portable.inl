// Matrix products in plain loops: what they mean.
#include "matmul_forms.inl"

template <class F>
struct PortableRow {
  static void run(const Product& p, int rows) {
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      for (int row = 0; row < rows; row++) block_of_row(p.w, block, p.ints(row), p.out(row, block));
    }
  }

  static void block_of_row(const Matrix& w, int block, const ActivationGroup* x, float* y) {
    float acc[kBlockRows] = {};
    const uint8_t* group = w.block(block);
    for (int g = 0; g < w.groups(); g++, group += F::kGroupBytes) {
      for (int scale = 0; scale < F::kScales; scale++) {
        for (int i = 0; i < kBlockRows; i++) {
          int32_t dot = F::start(x[g], scale);
          for (int c = scale * F::kScaleGroup; c < (scale + 1) * F::kScaleGroup; c++) dot += code_at(group, F::kQuant, i, c) * x[g].q[c];
          acc[i] = __builtin_fmaf(float(dot), scale_at(F::scales(group, scale), F::kFloat32, i) * x[g].d, acc[i]);
          if (F::kHasMin) acc[i] = __builtin_fmaf(scale_at(F::minimums(group, scale), F::kFloat32, i), F::sum(x[g], scale), acc[i]);
        }
      }
    }
    __builtin_memcpy(y, acc, sizeof acc);
  }
};

template <>
struct PortableRow<Bf16Form> {
  static void run(const Product& p, int rows) {
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      const uint8_t* weights = p.w.block(block);
      for (int row = 0; row < rows; row++) {
        Lanes acc = zero();
        for (int pair = 0; pair < p.w.padded_cols() / 2; pair++) {
          acc = dot_pairs(acc, load_pairs(weights + size_t(pair) * 64), set1_pairs(p.bf16s(row) + 2 * pair));
        }
        store(p.out(row, block), acc);
      }
    }
  }
};

static void fill_matmul(Kernels& k) { k.matmul = matmul_by_form<PortableRow>; }
