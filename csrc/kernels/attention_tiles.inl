// The two products of attention with AMX. A page's keys lie as pairs of dims by 16 slots, and its values as pairs of slots by dims: tiles as they are.
//
// Scores add 32 dims after 32 dims, and the output page after page; within these the processor adds in its own order. So a query's sums depend on nothing
// but itself and where its keys lie, whoever is beside it, but they are not the bits of lanes.

constexpr int kTile = 16;  // queries: a tile's rows

// Tiles 0 .. 3 are sums, 4 and 5 queries or their weights (32 bytes of 64 in 5), 6 and 7 keys or values (8 rows of 16 in 7).
struct AttentionScope {
  Tiles tiles;

  STERNA_INLINE explicit AttentionScope(int queries) : tiles(shapes(queries)) {}

  STERNA_INLINE static TileShapes shapes(int queries) {
    const TileShape sums{queries, 64};
    return {{sums, sums, sums, sums, {queries, 64}, {queries, 32}, {16, 64}, {8, 64}}};
  }
};

// Adds 16 pairs of dims from q on, or 8 with kHalf, to the scores of four pages.
template <bool kHalf>
STERNA_INLINE void add_keys(const uint16_t* q, size_t q_bytes, const uint8_t* const (&keys)[4]) {
  if constexpr (kHalf) {
    _tile_loadd(5, q, q_bytes);
    _tile_loadd(7, keys[0], 64);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, keys[1], 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(7, keys[2], 64);
    _tile_dpbf16ps(2, 5, 7);
    _tile_loadd(7, keys[3], 64);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_loadd(4, q, q_bytes);
    _tile_loadd(6, keys[0], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, keys[1], 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(6, keys[2], 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(6, keys[3], 64);
    _tile_dpbf16ps(3, 4, 6);
  }
}

// scores[count][kSpan] of the queries from `first` on, for the pages of `parts`. Pages beyond the parts' ends are taken to be the ends: their scores are
// not looked at.
static void score_tile(const Queries& queries, int first, int count, const Parts& parts, float* scores) {
  const int dim = padded_dim(queries.head_dim);
  const size_t q_bytes = size_t(dim) * 2, row_bytes = kSpan * sizeof(float);
  const uint16_t* q = queries.q + size_t(first) * dim;
  const Lanes scale = set1(queries.scale);
  for (int page = parts.first / 4 * 4; page <= parts.last; page += 4) {
    const uint8_t *keys[4], *ahead[4];
    for (int i = 0; i < 4; i++) keys[i] = parts.keys(page + i)[0], ahead[i] = parts.keys(page + i)[Parts::kAhead];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int d = 0;
    for (; d + 32 <= dim; d += 32) {
      add_keys<false>(q + d, q_bytes, keys);
      for (const uint8_t*& each : keys) each += 16 * 64;
    }
    if (d < dim) add_keys<true>(q + d, q_bytes, keys);
    for (const uint8_t* each : ahead)
      for (int line = 0; line < dim / 2; line++) __builtin_prefetch(each + line * 64, 0, 2);
    float* to = scores + page * kPage;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + kPage, row_bytes);
    _tile_stored(2, to + 2 * kPage, row_bytes);
    _tile_stored(3, to + 3 * kPage, row_bytes);
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        float* at = to + r * kSpan + i * kPage;
        const Lanes score = mul(load(at), scale);
        store(at, queries.softcap != 0.0f ? softcap(score, queries.softcap) : score);
      }
    }
  }
}

// A page's values, kVectors vectors of dims, with zeros in slots outside from .. to - 1: what lies there may be NaN, which a weight of zero would not hide.
template <int kVectors>
STERNA_INLINE void keep_slots(const uint8_t* values, size_t row_bytes, int from, int to, uint8_t* kept) {
  for (int pair = 0; pair < kPage / 2; pair++) {
    const auto keeps = [&](int slot) { return slot >= from && slot < to; };
    const uint32_t keep = (keeps(2 * pair) ? 0x0000ffffu : 0) | (keeps(2 * pair + 1) ? 0xffff0000u : 0);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; c++) store_pairs(kept + (pair * kVectors + c) * 64, keep_pairs(load_pairs(values + pair * row_bytes + c * 64), keep));
  }
}

// Adds a page's values, kVectors tiles of 16 dims, weighed by p, to the sums.
template <int kVectors>
STERNA_INLINE void add_values(const uint16_t* p, const uint8_t* values, size_t row_bytes) {
  _tile_loadd(5, p, kSpan * sizeof(uint16_t));
  _tile_loadd(7, values, row_bytes);
  _tile_dpbf16ps(0, 5, 7);
  if constexpr (kVectors > 1) {
    _tile_loadd(7, values + 64, row_bytes);
    _tile_dpbf16ps(1, 5, 7);
  }
  if constexpr (kVectors > 2) {
    _tile_loadd(7, values + 128, row_bytes);
    _tile_dpbf16ps(2, 5, 7);
  }
  if constexpr (kVectors > 3) {
    _tile_loadd(7, values + 192, row_bytes);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// o[count][dim], 16 * kVectors dims of it from dim `at` on.
template <int kVectors>
static void output_vectors(const uint16_t* p, const Parts& parts, int dim, int at, KeyRange keys, int count, float* o) {
  alignas(64) uint8_t kept[kPage / 2 * kVectors * 64];
  const size_t row_bytes = size_t(dim) * 4;
  _tile_zero(0);
  if constexpr (kVectors > 1) _tile_zero(1);
  if constexpr (kVectors > 2) _tile_zero(2);
  if constexpr (kVectors > 3) _tile_zero(3);
  for (int page = keys.first_page(); page < keys.end_page(); page++) {
    const uint8_t* const* part = parts.values(page);
    const uint8_t* values = part[0] + at * 4;
    const int from = larger(keys.begin - page * kPage, 0), to = smaller(keys.end - page * kPage, kPage);
    if (at == 0) {
      for (int line = 0; line < dim / 2; line++) __builtin_prefetch(part[Parts::kAhead] + line * 64, 0, 2);
    }
    if (from == 0 && to == kPage) {
      add_values<kVectors>(p + page * kPage, values, row_bytes);
    } else {
      keep_slots<kVectors>(values, row_bytes, from, to, kept);
      written();
      add_values<kVectors>(p + page * kPage, kept, kVectors * 64);
    }
  }
  o += at;
  _tile_stored(0, o, row_bytes);
  if constexpr (kVectors > 1) _tile_stored(1, o + 16, row_bytes);
  if constexpr (kVectors > 2) _tile_stored(2, o + 32, row_bytes);
  if constexpr (kVectors > 3) _tile_stored(3, o + 48, row_bytes);
  // Adding zero makes one zero of two: whether a sum ends as -0 may depend on how many weights of zero came after it.
  for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; c++) store(o + size_t(r) * dim + c * kLanes, add(load(o + size_t(r) * dim + c * kLanes), zero()));
  }
}

static void output_tile(const uint16_t* p, const Parts& parts, int dim, KeyRange keys, int count, float* o) {
  using Vectors = void (*)(const uint16_t*, const Parts&, int, int, KeyRange, int, float*);
  static constexpr Vectors kByVectors[] = {output_vectors<1>, output_vectors<2>, output_vectors<3>, output_vectors<4>};
  written();
  for (int at = 0; at < dim; at += 64) kByVectors[smaller(4, (dim - at) / kLanes) - 1](p, parts, dim, at, keys, count, o);
}
