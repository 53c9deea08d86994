// Matrix products with AVX-512 VNNI: a lane is an output, a panel's rows share each group's unpacked weights, and what belongs to an activation comes
// as a broadcast from its cache line.
#include "matmul_forms.inl"
#include "matmul_bf16.inl"

// A group of 32 columns of a block, ready for use.
template <class F>
struct Weights512 {
  __m512i quads[8];  // columns 4j .. 4j+3
  __m512 d[F::kScales], m[F::kScales];

  STERNA_INLINE static __m512 floats(const uint8_t* p) {
    if constexpr (F::kFloat32) return _mm512_loadu_ps(p);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  STERNA_INLINE explicit Weights512(const uint8_t* group) {
    if constexpr (F::kQuant == Quant::kInt4) {
      const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_loadu_si512(group + 64 * j);
        quads[j] = _mm512_and_si512(both, low);
        quads[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) quads[j] = _mm512_loadu_si512(group + 64 * j);
    }
#pragma GCC unroll 2
    for (int scale = 0; scale < F::kScales; scale++) {
      d[scale] = floats(F::scales(group, scale));
      if constexpr (F::kHasMin) m[scale] = floats(F::minimums(group, scale));
    }
  }

  STERNA_INLINE __m512 add_to(__m512 acc, const ActivationGroup& x) const {
    constexpr int kQuads = 8 / F::kScales;
    const int32_t* q = reinterpret_cast<const int32_t*>(x.q);
#pragma GCC unroll 2
    for (int scale = 0; scale < F::kScales; scale++) {
      __m512i dot = F::kHasMin ? _mm512_setzero_si512() : _mm512_set1_epi32(F::start(x, scale));
#pragma GCC unroll 8
      for (int j = scale * kQuads; j < (scale + 1) * kQuads; j++) dot = _mm512_dpbusd_epi32(dot, quads[j], _mm512_set1_epi32(q[j]));
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d[scale], _mm512_set1_ps(x.d)), acc);
      if constexpr (F::kHasMin) acc = _mm512_fmadd_ps(m[scale], _mm512_set1_ps(F::sum(x, scale)), acc);
    }
    return acc;
  }
};

// Adds the refinements of kCount rows. Rows mostly refine the same groups, a model's large channels being the same for all tokens: each group that
// some row refines is unpacked once.
template <class F, int kCount>
STERNA_INLINE void add_refinements(const Product& p, int block, __m512 (&acc)[kCount]) {
  const ActivationGroup* refinement[kCount];
  const int32_t* refined[kCount];
#pragma GCC unroll 8
  for (int r = 0; r < kCount; r++) refinement[r] = p.refinements(r), refined[r] = p.refined(r);
  for (;;) {
    int32_t g = *refined[0];
#pragma GCC unroll 8
    for (int r = 1; r < kCount; r++) g = *refined[r] < g ? *refined[r] : g;
    if (g == kNoGroup) return;
    const Weights512<F> weights(p.w.block(block) + size_t(g) * F::kGroupBytes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; r++) {
      if (*refined[r] != g) continue;
      acc[r] = weights.add_to(acc[r], *refinement[r]++);
      refined[r]++;
    }
  }
}

// How far ahead of use weights are asked for. One row, and a few short ones, read faster by the processor's own prediction.
constexpr int kAheadBytes = 10 << 10;
constexpr int kFewRows = 6, kShortGroups = 24;

constexpr int kPanelRows512 = 8;

template <class F>
struct Panel512 {
  static constexpr int kRows = kPanelRows512;

  template <int kCount>
  static void run(const Product& p) {
    const int groups = p.w.groups();
    const int ahead = kCount <= kFewRows && groups <= kShortGroups ? 0 : kAheadBytes;
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      __m512 acc[kCount];
#pragma GCC unroll 8
      for (int r = 0; r < kCount; r++) acc[r] = _mm512_setzero_ps();
      const uint8_t* group = p.w.block(block);
      for (int g = 0; g < groups; g++, group += F::kGroupBytes) {
        if constexpr (kCount > 1) ask<(F::kGroupBytes + 63) / 64>(p, group, ahead);
        const Weights512<F> weights(group);
#pragma GCC unroll 8
        for (int r = 0; r < kCount; r++) acc[r] = weights.add_to(acc[r], p.ints(r)[g]);
      }
      add_refinements<F>(p, block, acc);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; r++) _mm512_storeu_ps(p.out(r, block), acc[r]);
    }
  }
};

template <>
struct Panel512<Bf16Form> : Bf16Panel<12, 12> {};

template <class F>
struct Rows512 {
  static void run(const Product& p, int rows) { run_panels<Panel512, F>(p, rows); }
};
