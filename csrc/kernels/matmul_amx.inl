// Matrix products with AMX. Tiles 0 .. 3 are sums of 16 rows by 16 outputs, 4 and 5 two of activations, 6 and 7 two of weights: four products share
// four loads.
//
// The int formats give the same bits as the other instruction sets: the products are exact integers, and the float steps the same. bfloat16 sums in
// the processor's own order, which depends on the columns only, so all of it takes tiles, single rows too; or, with STERNA_PORTABLE_BF16, none.
#include "matmul_panels512.inl"

constexpr int kTileRows = 16;
constexpr int kTileAheadBytes = 2560;  // how far ahead in a block weights are asked for

// Tiles for `rows` rows (up to 16) of activations of x_bytes each, and weights to fit.
STERNA_INLINE TileShapes product_tiles(int rows, int x_bytes) {
  const TileShape sums{rows, 64}, x{rows, x_bytes}, weights{x_bytes / 4, 64};
  return {{sums, sums, sums, sums, x, x, weights, weights}};
}

template <int kX, int kBlocks>
STERNA_INLINE void zero_sums() {
  _tile_zero(0);
  if constexpr (kBlocks == 2) _tile_zero(1);
  if constexpr (kX == 2) _tile_zero(2);
  if constexpr (kX == 2 && kBlocks == 2) _tile_zero(3);
}

// Sum 2 * i + b goes to to + i * x_bytes + b * block_bytes.
template <int kX, int kBlocks>
STERNA_INLINE void store_sums(uint8_t* to, size_t x_bytes, size_t block_bytes, size_t stride) {
  _tile_stored(0, to, stride);
  if constexpr (kBlocks == 2) _tile_stored(1, to + block_bytes, stride);
  if constexpr (kX == 2) _tile_stored(2, to + x_bytes, stride);
  if constexpr (kX == 2 && kBlocks == 2) _tile_stored(3, to + x_bytes + block_bytes, stride);
}

template <int kX, int kBlocks>
STERNA_INLINE void load_sums(const uint8_t* from, size_t x_bytes, size_t block_bytes, size_t stride) {
  _tile_loadd(0, from, stride);
  if constexpr (kBlocks == 2) _tile_loadd(1, from + block_bytes, stride);
  if constexpr (kX == 2) _tile_loadd(2, from + x_bytes, stride);
  if constexpr (kX == 2 && kBlocks == 2) _tile_loadd(3, from + x_bytes + block_bytes, stride);
}

template <int kX, int kBlocks>
STERNA_INLINE void load_tiles(const uint8_t* x, size_t x_stride, const uint8_t* weights, size_t weights_next) {
  _tile_loadd(4, x, x_stride);
  if constexpr (kX == 2) _tile_loadd(5, x + kTileRows * x_stride, x_stride);
  _tile_loadd(6, weights, 64);
  if constexpr (kBlocks == 2) _tile_loadd(7, weights + weights_next, 64);
}

template <class F>
struct TileProducts {
  static constexpr int kRowBytes = F::kScaleGroup;
  static constexpr int kFewest = 8;  // fewer rows are faster without tiles
  static constexpr int kUnits = 4;  // groups, or their halves, that are multiplied before their sums are scaled: these stay in the nearest cache
  static constexpr int kGroups = kUnits / F::kScales;

  // What the products of a batch of groups of two blocks need and give.
  struct Batch {
    alignas(64) uint8_t quads[2][kGroups * 512];
    alignas(64) float d[2][kUnits][16], m[2][kUnits][16];
    alignas(64) int32_t sums[kUnits][4][kTileRows][16];
  };

  STERNA_INLINE static void unpack(const uint8_t* group, int block, int g, Batch& batch) {
    const Weights512<F> weights(group);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m512i quad = weights.quads[j];
      // Without minimums the zero point goes here, once, and products are signed.
      if constexpr (!F::kHasMin) quad = _mm512_sub_epi8(quad, _mm512_set1_epi8(F::kQuant == Quant::kInt4 ? 8 : -128));
      _mm512_store_si512(&batch.quads[block][g * 512 + 64 * j], quad);
    }
#pragma GCC unroll 2
    for (int scale = 0; scale < F::kScales; scale++) {
      _mm512_store_ps(batch.d[block][g * F::kScales + scale], weights.d[scale]);
      if constexpr (F::kHasMin) _mm512_store_ps(batch.m[block][g * F::kScales + scale], weights.m[scale]);
    }
  }

  template <int kX, int kBlocks>
  STERNA_INLINE static void multiply(const uint8_t* x, size_t x_stride, int units, Batch& batch) {
    for (int unit = 0; unit < units; unit++) {
      const uint8_t* q = x + unit / F::kScales * sizeof(ActivationGroup) + unit % F::kScales * kRowBytes;
      zero_sums<kX, kBlocks>();
      load_tiles<kX, kBlocks>(q, x_stride, &batch.quads[0][unit * kRowBytes * 16], sizeof batch.quads[0]);
      if constexpr (F::kHasMin) {
        _tile_dpbsud(0, 4, 6);
        if constexpr (kBlocks == 2) _tile_dpbsud(1, 4, 7);
        if constexpr (kX == 2) _tile_dpbsud(2, 5, 6);
        if constexpr (kX == 2 && kBlocks == 2) _tile_dpbsud(3, 5, 7);
      } else {
        _tile_dpbssd(0, 4, 6);
        if constexpr (kBlocks == 2) _tile_dpbssd(1, 4, 7);
        if constexpr (kX == 2) _tile_dpbssd(2, 5, 6);
        if constexpr (kX == 2 && kBlocks == 2) _tile_dpbssd(3, 5, 7);
      }
      constexpr size_t kTileBytes = sizeof batch.sums[0][0];
      store_sums<kX, kBlocks>(reinterpret_cast<uint8_t*>(batch.sums[unit]), 2 * kTileBytes, kTileBytes, 64);
    }
  }

  // Scales the sums of 8 rows, number `first` and on of p's, and adds them to y. Those behind p's `rows` rows stand for the last one again and are
  // not stored.
  template <int kBlocks>
  STERNA_INLINE static void add_sums(const Product& p, int tile, int first, int rows, int group, int units, const Batch& batch, int block) {
    constexpr int kAtOnce = 8;
    __m512 acc[kBlocks][kAtOnce];
    const ActivationGroup* x[kAtOnce];
    const int last = rows - first - 1;  // rows behind it stand for it again, and are not stored
#pragma GCC unroll 8
    for (int r = 0; r < kAtOnce; r++) {
      const int row = first + (r < last ? r : last);
      x[r] = p.ints(row) + group;
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) acc[b][r] = group == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(p.out(row, block + b));
    }
    for (int unit = 0; unit < units; unit++) {
      __m512 d[kBlocks], m[kBlocks];
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) {
        d[b] = _mm512_load_ps(batch.d[b][unit]);
        if constexpr (F::kHasMin) m[b] = _mm512_load_ps(batch.m[b][unit]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kAtOnce; r++) {
        const ActivationGroup& each = x[r][unit / F::kScales];
        const __m512 x_d = _mm512_set1_ps(each.d);
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; b++) {
          const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(batch.sums[unit][2 * tile + b][first + r]));
          acc[b][r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(d[b], x_d), acc[b][r]);
          if constexpr (F::kHasMin) acc[b][r] = _mm512_fmadd_ps(m[b], _mm512_set1_ps(F::sum(each, unit % F::kScales)), acc[b][r]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kAtOnce; r++) {
      if (r > last) break;
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) _mm512_storeu_ps(p.out(first + r, block + b), acc[b][r]);
    }
  }

  // One or two tiles of rows against a batch.
  template <int kX, int kBlocks>
  STERNA_INLINE static void tiles(const Product& p, int tile_rows, int group, int units, Batch& batch, int block) {
    multiply<kX, kBlocks>(p.x + size_t(group) * sizeof(ActivationGroup), p.x_stride, units, batch);
    for (int tile = 0; tile < kX; tile++) {
      const Product rows = p.rows_from(tile * kTileRows);
      for (int first = 0; first < tile_rows; first += 8) add_sums<kBlocks>(rows, tile, first, tile_rows, group, units, batch, block);
    }
  }

  // `rows` rows, a multiple of 16 or fewer than that, of one or two blocks. A batch of groups is unpacked once for all rows; the sums wait in y.
  template <int kBlocks>
  static void blocks(const Product& p, int rows, int block) {
    Batch batch;
    const int tile_rows = rows < kTileRows ? rows : kTileRows, groups = p.w.groups();
    if (tile_rows < kTileRows) __builtin_memset(batch.sums, 0, sizeof batch.sums);  // what a tile does not write is read
    for (int group = 0; group < groups; group += kGroups) {
      const int count = groups - group < kGroups ? groups - group : kGroups, units = count * F::kScales;
      for (int b = 0; b < kBlocks; b++) {
        const uint8_t* packed = p.w.block(block + b) + size_t(group) * F::kGroupBytes;
        for (int g = 0; g < count; g++, packed += F::kGroupBytes) {
          for (int line = 0; line < F::kGroupBytes; line += 64) __builtin_prefetch(packed + kTileAheadBytes + line, 0, 2);
          unpack(packed, b, g, batch);
        }
      }
      written();
      int row = 0;
      for (; row + 2 * kTileRows <= rows; row += 2 * kTileRows) tiles<2, kBlocks>(p.rows_from(row), kTileRows, group, units, batch, block);
      if (row < rows) tiles<1, kBlocks>(p.rows_from(row), tile_rows, group, units, batch, block);
    }
  }
};

template <>
struct TileProducts<Bf16Form> {
  static constexpr int kRowBytes = 64;
  static constexpr int kFewest = 1;
  static constexpr int kGroups = 8;  // of two blocks, in the nearest cache while tiles of rows pass over them

  template <int kX, int kBlocks>
  STERNA_INLINE static void tiles(const Product& p, int group, int count, int block) {
    const uint8_t *x = p.x + size_t(group) * kRowBytes, *weights = p.w.block(block) + size_t(group) * 1024;
    uint8_t* y = reinterpret_cast<uint8_t*>(p.out(0, block));
    const size_t y_bytes = p.y_stride * sizeof(float), block_bytes = p.w.block_bytes();
    if (group == 0) {
      zero_sums<kX, kBlocks>();
    } else {
      load_sums<kX, kBlocks>(y, kTileRows * y_bytes, 64, y_bytes);
    }
    for (int g = 0; g < count; g++, x += kRowBytes, weights += 1024) {
      load_tiles<kX, kBlocks>(x, p.x_stride, weights, block_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kBlocks == 2) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kX == 2) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kX == 2 && kBlocks == 2) _tile_dpbf16ps(3, 5, 7);
    }
    store_sums<kX, kBlocks>(y, kTileRows * y_bytes, 64, y_bytes);
  }

  template <int kBlocks>
  static void blocks(const Product& p, int rows, int block) {
    const int groups = p.w.groups(), at_once = rows <= 2 * kTileRows ? groups : kGroups;
    for (int group = 0; group < groups; group += at_once) {
      const int count = groups - group < at_once ? groups - group : at_once;
      int row = 0;
      for (; row + 2 * kTileRows <= rows; row += 2 * kTileRows) tiles<2, kBlocks>(p.rows_from(row), group, count, block);
      if (row < rows) tiles<1, kBlocks>(p.rows_from(row), group, count, block);
    }
  }
};

// What tiles leave to do: the refinements of rows whose sums over the groups are in y.
template <class F>
struct Refinements {
  static constexpr int kRows = 8;

  template <int kCount>
  static void run(const Product& p) {
    for (int block = p.first_block; block < p.first_block + p.num_blocks; block++) {
      __m512 acc[kCount];
#pragma GCC unroll 8
      for (int r = 0; r < kCount; r++) acc[r] = _mm512_loadu_ps(p.out(r, block));
      add_refinements<F>(p, block, acc);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; r++) _mm512_storeu_ps(p.out(r, block), acc[r]);
    }
  }
};

template <class F>
struct RowsAmx {
  // Whole tiles of rows, and then the rest, over as many blocks at once as stay in the cache.
  static void run(const Product& p, int rows) {
    const int whole = rows / kTileRows * kTileRows, rest = rows - whole;
    for_each_part(p, (whole > 0) + (rest > 0), [&](const Product& part) __attribute__((always_inline)) {
      const int tiled = rest >= TileProducts<F>::kFewest ? rows : whole;
      if (whole > 0) run_tiles(part, whole);
      if (tiled > whole) run_tiles(part.rows_from(whole), rest);
      if constexpr (F::kQuant != Quant::kBf16) {
        if (tiled > 0) run_panels<Refinements, F>(part, tiled);
        if (tiled < rows) run_panel<Panel512, F, TileProducts<F>::kFewest - 1>(part.rows_from(whole), rest);
      }
    });
  }

  static void run_tiles(const Product& p, int rows) {
    const Tiles tiles(product_tiles(rows < kTileRows ? rows : kTileRows, TileProducts<F>::kRowBytes));
    int block = p.first_block;
    const int end = block + p.num_blocks;
    for (; block + 2 <= end; block += 2) TileProducts<F>::template blocks<2>(p, rows, block);
    if (block < end) TileProducts<F>::template blocks<1>(p, rows, block);
  }
};

#if STERNA_PORTABLE_BF16
template <>
struct RowsAmx<Bf16Form> : Rows512<Bf16Form> {};
#endif

static void fill_matmul(Kernels& k) { k.matmul = matmul_by_form<RowsAmx>; }
