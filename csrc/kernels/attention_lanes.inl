// The two products of attention over lanes: scores, and the weighted sum of values. Blocks of queries times vectors whose sums stay in registers.

constexpr int kTile = 24;  // queries whose scores lie in the first cache

// What stands ready while a tile of queries is computed: nothing.
struct AttentionScope {
  STERNA_INLINE explicit AttentionScope(int) {}
};

// Blocks that no call would use are not made.
constexpr int at_most(int queries) { return smaller(queries, kBlockQueries); }

// Scores of kQueries queries, q apart by dim, for the keys of kBlockVectors pages from `page` on; scores of a query are kSpan apart. Pages beyond the
// parts' ends are taken to be the ends: their scores are not looked at.
template <int kQueries>
static void score_block(const uint16_t* q, int dim, const Parts& parts, int page, const Queries& queries, float* scores) {
  const uint8_t *pages[kBlockVectors], *ahead[kBlockVectors];
  for (int c = 0; c < kBlockVectors; c++) pages[c] = parts.keys(page + c)[0], ahead[c] = parts.keys(page + c)[Parts::kAhead];
  Lanes sums[kQueries][kBlockVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kQueries; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kBlockVectors; c++) sums[r][c] = zero();
  for (int j = 0; j < dim / 2; j++) {
    Pairs k[kBlockVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kBlockVectors; c++) {
      k[c] = load_pairs(pages[c] + size_t(j) * 64);
      __builtin_prefetch(ahead[c] + size_t(j) * 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kQueries; r++) {
      const Pairs pair = set1_pairs(q + size_t(r) * dim + 2 * j);
#pragma GCC unroll 8
      for (int c = 0; c < kBlockVectors; c++) sums[r][c] = dot_pairs(sums[r][c], k[c], pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kQueries; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kBlockVectors; c++) store(scores + r * kSpan + c * kLanes, mul(sums[r][c], set1(queries.scale)));
  if (queries.softcap != 0.0f) {
    for (int r = 0; r < kQueries; r++)
      for (int c = 0; c < kBlockVectors; c++) {
        float* at = scores + r * kSpan + c * kLanes;
        store(at, softcap(load(at), queries.softcap));
      }
  }
}

// scores[count][kSpan] of the queries from `first` on, for the pages of `parts`.
static void score_tile(const Queries& queries, int first, int count, const Parts& parts, float* scores) {
  using Block = void (*)(const uint16_t*, int, const Parts&, int, const Queries&, float*);
  static constexpr Block kBlocks[] = {score_block<1>,           score_block<at_most(2)>, score_block<at_most(3)>,
                                      score_block<at_most(4)>, score_block<at_most(5)>, score_block<at_most(6)>};
  const int dim = padded_dim(queries.head_dim);
  const uint16_t* q = queries.q + size_t(first) * dim;
  for (int page = parts.first / kBlockVectors * kBlockVectors; page <= parts.last; page += kBlockVectors) {
    for (int r = 0; r < count; r += kBlockQueries) {
      const int rows = smaller(kBlockQueries, count - r);
      kBlocks[rows - 1](q + size_t(r) * dim, dim, parts, page, queries, scores + r * kSpan + page * kPage);
    }
  }
}

// Where kVectors vectors of dims, from dim `at` on, lie in a span's values.
struct Values {
  const Parts& parts;
  size_t row_bytes;  // of a pair of slots
  int at;
  int lines_ahead;  // of a row: what the first to read them asks for
};

// Adds pairs of keys first .. end - 1 to the sums of kQueries queries for kVectors vectors of dims. `keep` says which slots of a pair count:
// what lies in the others may be NaN, which a weight of zero would not hide.
template <int kQueries, int kVectors>
STERNA_INLINE void add_values(Lanes (&sums)[kQueries][kVectors], const uint16_t* p, const Values& values, int first, int end, uint32_t keep) {
  for (unsigned pair = unsigned(first); pair < unsigned(end); pair++) {
    const uint8_t* const* part = values.parts.values(int(pair / 8));
    const size_t row = (pair % 8) * values.row_bytes;
    for (int line = 0; line < values.lines_ahead; line++) __builtin_prefetch(part[Parts::kAhead] + row + line * 64, 0, 2);
    Pairs v[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) v[c] = keep_pairs(load_pairs(part[0] + row + (values.at + c * kLanes) * 4), keep);
#pragma GCC unroll 8
    for (int r = 0; r < kQueries; r++) {
      const Pairs weights = set1_pairs(p + r * kSpan + 2 * pair);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; c++) sums[r][c] = dot_pairs(sums[r][c], v[c], weights);
    }
  }
}

// o[kQueries][dim], 16 * kVectors dims of it.
template <int kQueries, int kVectors>
static void output_block(const uint16_t* p, const Values& values, int dim, KeyRange keys, float* o) {
  Lanes sums[kQueries][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kQueries; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) sums[r][c] = zero();
  int pair = keys.begin / 2;
  if (keys.begin % 2) add_values(sums, p, values, pair, pair + 1, 0xffff0000u), pair++;
  add_values(sums, p, values, pair, keys.end / 2, 0xffffffffu);
  if (keys.end % 2) add_values(sums, p, values, keys.end / 2, keys.end / 2 + 1, 0x0000ffffu);
  // Adding zero makes one zero of two: whether a sum ends as -0 may depend on how many weights of zero came after it.
#pragma GCC unroll 8
  for (int r = 0; r < kQueries; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) store(o + size_t(r) * dim + values.at + c * kLanes, add(sums[r][c], zero()));
}

template <int kVectors>
static void output_rows(const uint16_t* p, Values values, int dim, KeyRange keys, int count, float* o) {
  using Block = void (*)(const uint16_t*, const Values&, int, KeyRange, float*);
  static constexpr Block kBlocks[] = {output_block<1, kVectors>,           output_block<at_most(2), kVectors>, output_block<at_most(3), kVectors>,
                                      output_block<at_most(4), kVectors>, output_block<at_most(5), kVectors>, output_block<at_most(6), kVectors>};
  for (int r = 0; r < count; r += kBlockQueries) {
    kBlocks[smaller(kBlockQueries, count - r) - 1](p + r * kSpan, values, dim, keys, o + size_t(r) * dim);
    values.lines_ahead = 0;
  }
}

static void output_tile(const uint16_t* p, const Parts& parts, int dim, KeyRange keys, int count, float* o) {
  using Rows = void (*)(const uint16_t*, Values, int, KeyRange, int, float*);
  static constexpr Rows kRows[] = {output_rows<1>, output_rows<smaller(2, kBlockVectors)>, output_rows<smaller(3, kBlockVectors)>,
                                   output_rows<smaller(4, kBlockVectors)>};
  for (int at = 0; at < dim; at += kBlockVectors * kLanes) {
    const Values values{parts, size_t(dim) * 4, at, at == 0 ? dim / kLanes : 0};
    kRows[smaller(kBlockVectors, (dim - at) / kLanes) - 1](p, values, dim, keys, count, o);
  }
}
