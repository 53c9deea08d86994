// What the matrix products of all instruction sets share: a weight format as a type, and how rows are cut into panels of as many as registers hold.
// An instruction set defines `panel`; nothing is decided in its inner loops.

template <Quant kQuant_, bool kHasMin_, bool kFloat32_, int kScaleGroup_>
struct Form {
  static constexpr Quant kQuant = kQuant_;
  static constexpr bool kHasMin = kHasMin_, kFloat32 = kFloat32_;
  static constexpr int kScaleGroup = kScaleGroup_;
  static constexpr int kScales = kGroup / kScaleGroup;  // of a group, each for 16 rows
  static constexpr int kQuantBytes = kQuant == Quant::kInt4 ? 256 : 512;
  static constexpr int kScaleBytes = kBlockRows * (kFloat32 ? 4 : 2);
  static constexpr int kGroupBytes = kQuantBytes + kScales * kScaleBytes * (kHasMin ? 2 : 1);

  STERNA_INLINE static const uint8_t* scales(const uint8_t* group, int scale) { return group + kQuantBytes + scale * kScaleBytes; }
  STERNA_INLINE static const uint8_t* minimums(const uint8_t* group, int scale) { return scales(group, kScales + scale); }
  // What the zero point adds to the dot product over the columns of a scale.
  STERNA_INLINE static int32_t start(const ActivationGroup& x, int scale) {
    if constexpr (kHasMin) return 0;
    if constexpr (kQuant == Quant::kInt4) return x.zero_int4;
    return kScales == 1 ? x.zero_int8 : x.zero_int8_16[scale];
  }
  STERNA_INLINE static float sum(const ActivationGroup& x, int scale) { return kScales == 1 ? x.s : x.s16[scale]; }
};
using Bf16Form = Form<Quant::kBf16, false, false, kGroup>;

// Where a product's results go, and what of it is asked for.
struct Product {
  const Matrix& w;
  const uint8_t* x;  // the first row
  size_t x_stride;
  int first_block, num_blocks;
  float* y;  // of the first row, from w's first block on
  size_t y_stride;
  Ahead& ahead;
  bool cached;  // the weights are in the cache: rows before these took the same

  STERNA_INLINE const ActivationGroup* ints(int row) const { return reinterpret_cast<const ActivationGroup*>(x + row * x_stride); }
  STERNA_INLINE const ActivationGroup* refinements(int row) const { return ints(row) + w.groups(); }
  STERNA_INLINE const int32_t* refined(int row) const { return reinterpret_cast<const int32_t*>(refinements(row) + most_refined(w.groups())); }
  STERNA_INLINE const uint16_t* bf16s(int row) const { return reinterpret_cast<const uint16_t*>(x + row * x_stride); }
  STERNA_INLINE float* out(int row, int block) const { return y + row * y_stride + size_t(block) * kBlockRows; }
  STERNA_INLINE Product rows_from(int row) const {
    return {w, x + row * x_stride, x_stride, first_block, num_blocks, y + row * y_stride, y_stride, ahead, cached || row > 0};
  }
  STERNA_INLINE Product blocks_from(int block, int count) const { return {w, x, x_stride, block, count, y, y_stride, ahead, cached}; }
};

// Asks for memory, before the use of a group of a few rows: for the weights that come `weights_ahead` bytes later, or where those are in the cache, for
// what else will be wanted. kAskedLines is what memory gives in the time.
constexpr int kAskedLines = 4;

template <int kLines>
STERNA_INLINE void ask(const Product& p, const uint8_t* weights, int weights_ahead) {
  if (!p.cached) {
#pragma GCC unroll 16
    for (int line = 0; line < kLines; line++) __builtin_prefetch(weights + weights_ahead + 64 * line, 0, 2);
    return;
  }
  Ahead& ahead = p.ahead;
  if (ahead.at >= ahead.end) {
    if (ahead.count == 0) return;
    ahead.at = ahead.base + size_t(*ahead.parts++) * ahead.stride;
    ahead.end = ahead.at + ahead.bytes;
    ahead.count--;
  }
#pragma GCC unroll 16
  for (int line = 0; line < kAskedLines; line++) __builtin_prefetch(ahead.at + 64 * line, 0, 2);
  ahead.at += 64 * kAskedLines;
}

// Runs `Each<Form>::run(product, rows)` for the matrix's format.
template <template <class> class Each, Quant kQuant, bool kHasMin, bool kFloat32>
void by_scale_group(const Product& p, int rows) {
  if constexpr (kQuant == Quant::kInt8) {
    if (p.w.scale_group == 16) return Each<Form<kQuant, kHasMin, kFloat32, 16>>::run(p, rows);
  }
  Each<Form<kQuant, kHasMin, kFloat32, kGroup>>::run(p, rows);
}
template <template <class> class Each, Quant kQuant>
void by_scales(const Product& p, int rows) {
  if (p.w.has_min) return p.w.float32_scales ? by_scale_group<Each, kQuant, true, true>(p, rows) : by_scale_group<Each, kQuant, true, false>(p, rows);
  return p.w.float32_scales ? by_scale_group<Each, kQuant, false, true>(p, rows) : by_scale_group<Each, kQuant, false, false>(p, rows);
}
template <template <class> class Each>
void by_form(const Product& p, int rows) {
  switch (p.w.quant) {
    case Quant::kInt4: return by_scales<Each, Quant::kInt4>(p, rows);
    case Quant::kInt8: return by_scales<Each, Quant::kInt8>(p, rows);
    case Quant::kBf16: return Each<Bf16Form>::run(p, rows);
  }
}

template <template <class> class Each>
void matmul_by_form(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride,
                    Ahead& ahead) {
  if (num_rows <= 0 || num_blocks <= 0) return;
  const uint8_t* row = x.data + first_row * x.stride;
  by_form<Each>(Product{w, row, x.stride, first_block, num_blocks, y + first_row * y_stride, y_stride, ahead, false}, num_rows);
}

// Panel<Form>::run<rows>(product) computes exactly `rows` rows, up to Panel<Form>::kRows. All rows are cut into panels as even as can be.
template <template <class> class Panel, class F, int kRows = Panel<F>::kRows>
STERNA_INLINE void run_panel(const Product& p, int rows) {
  if (rows == kRows) {
    Panel<F>::template run<kRows>(p);
  } else if constexpr (kRows > 1) {
    run_panel<Panel, F, kRows - 1>(p, rows);
  }
}

constexpr size_t kCachedBytes = 256 << 10;

// `each(part)` for parts of p's blocks: all of them, or where rows come in several passes, as many as stay in the cache.
template <class Each>
STERNA_INLINE void for_each_part(const Product& p, int passes, Each&& each) {
  const int most = int(kCachedBytes / p.w.block_bytes()), at_once = passes == 1 ? p.num_blocks : most > 1 ? most : 1;
  const int end = p.first_block + p.num_blocks;
  for (int block = p.first_block; block < end; block += at_once) each(p.blocks_from(block, end - block < at_once ? end - block : at_once));
}

template <template <class> class Panel, class F>
void run_panels(const Product& p, int rows) {
  const int panels = (rows + Panel<F>::kRows - 1) / Panel<F>::kRows;
  for_each_part(p, panels, [&](const Product& part) {
    for (int i = 0, row = 0; i < panels; i++) {
      const int next = int(int64_t(rows) * (i + 1) / panels);
      run_panel<Panel, F>(part.rows_from(row), next - row);
      row = next;
    }
  });
}
