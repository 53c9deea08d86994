// Matrix products with AVX2: eight outputs a vector. vpmaddubsw adds two products of bytes in 16 bits and saturates, so weights go in as nibbles: the
// sum over a group is at most 16 * 15 * 127 in a lane. An int8 weight is two planes of nibbles.
#include "matmul_forms.inl"
#include "matmul_bf16.inl"

template <class F>
struct Panel256 {
  static constexpr int kRows = 4;
  static constexpr int kVectors = F::kQuantBytes / 64 / F::kScales;  // of a group, for a scale

  template <int kCount>
  static void run(const Product& p) {
    const int groups = p.w.groups();
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      __m256 acc[2][kCount];
#pragma GCC unroll 4
      for (int r = 0; r < kCount; r++) acc[0][r] = acc[1][r] = _mm256_setzero_ps();
      const uint8_t* group = p.w.block(block);
      for (int g = 0; g < groups; g++, group += F::kGroupBytes) {
        const ActivationGroup* x[kCount];
#pragma GCC unroll 4
        for (int r = 0; r < kCount; r++) x[r] = p.ints(r) + g;
#pragma GCC unroll 2
        for (int scale = 0; scale < F::kScales; scale++) {
          add_group<kCount>(x, group, scale, 0, acc[0]);
          asm volatile("" ::: "memory");  // load the activations again: there are not the registers to keep them
          add_group<kCount>(x, group, scale, 1, acc[1]);
          asm volatile("" ::: "memory");
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kCount; r++) {
        _mm256_storeu_ps(p.out(r, block), acc[0][r]);
        _mm256_storeu_ps(p.out(r, block) + 8, acc[1][r]);
      }
      for (int r = 0; r < kCount; r++) add_refinements(p.rows_from(r), block);
    }
  }

  // Of p's first row, whose sums over the groups are in y.
  static void add_refinements(const Product& p, int block) {
    float* y = p.out(0, block);
    const ActivationGroup* x[] = {p.refinements(0)};
    for (const int32_t* g = p.refined(0); *g != kNoGroup; g++, x[0]++) {
      const uint8_t* group = p.w.block(block) + size_t(*g) * F::kGroupBytes;
      for (int half = 0; half < 2; half++) {
        __m256 acc[] = {_mm256_loadu_ps(y + 8 * half)};
        for (int scale = 0; scale < F::kScales; scale++) add_group<1>(x, group, scale, half, acc);
        _mm256_storeu_ps(y + 8 * half, acc[0]);
      }
    }
  }

  // Adds the columns of a scale to outputs 8 * half .. 8 * half + 7.
  template <int kCount>
  STERNA_INLINE static void add_group(const ActivationGroup* const (&x)[kCount], const uint8_t* group, int scale, int half, __m256 (&acc)[kCount]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i low[kCount], high[kCount];  // sums of products with the planes of nibbles; int4 has one plane, of twice the columns
#pragma GCC unroll 4
    for (int r = 0; r < kCount; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = scale * kVectors; j < (scale + 1) * kVectors; j++) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 64 * j + 32 * half));
      const __m256i even = _mm256_and_si256(both, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; r++) {
        const int32_t* q = reinterpret_cast<const int32_t*>(x[r]->q);
        low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(even, _mm256_set1_epi32(q[j])));
        if constexpr (F::kQuant == Quant::kInt4) {
          low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(odd, _mm256_set1_epi32(q[j + 4])));
        } else {
          high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(odd, _mm256_set1_epi32(q[j])));
        }
      }
    }
    const __m256 d = floats(F::scales(group, scale), half);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; r++) {
      __m256i dot = _mm256_madd_epi16(low[r], _mm256_set1_epi16(1));
      if constexpr (F::kQuant == Quant::kInt8) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(high[r], _mm256_set1_epi16(16)));
      if constexpr (!F::kHasMin) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(F::start(*x[r], scale)));
      acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(d, _mm256_set1_ps(x[r]->d)), acc[r]);
      if constexpr (F::kHasMin) acc[r] = _mm256_fmadd_ps(floats(F::minimums(group, scale), half), _mm256_set1_ps(F::sum(*x[r], scale)), acc[r]);
    }
  }

  STERNA_INLINE static __m256 floats(const uint8_t* p, int half) {
    if constexpr (F::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + 8 * half);
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + half));
  }
};

template <>
struct Panel256<Bf16Form> : Bf16Panel<4, 4> {};

template <class F>
struct Rows256 {
  static void run(const Product& p, int rows) { run_panels<Panel256, F>(p, rows); }
};

static void fill_matmul(Kernels& k) { k.matmul = matmul_by_form<Rows256>; }
