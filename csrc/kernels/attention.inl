// Attention over one span of keys at a time. Contracts in kernels.h.
//
// Queries are taken kTile at a time, through three stages: scores (16 keys of a page are the lanes, a pair of a query's dims is broadcast), weights
// (the softmax over the span), and output (16 dims are the lanes, a pair of weights is broadcast). The first and the last are products, which AMX has
// tiles for.

#if defined(STERNA_HAS_DPBF16)
constexpr int kBlockQueries = 6, kBlockVectors = 4;  // 24 sums and 4 vectors of 32 registers
#elif defined(STERNA_LANES_AVX512)
constexpr int kBlockQueries = 4, kBlockVectors = 4;  // 16 sums, and 4 vectors as two halves each
#elif defined(STERNA_LANES_AVX2) || defined(__FP_FAST_FMAF)
constexpr int kBlockQueries = 4, kBlockVectors = 1;  // 16 registers are 8 of these lanes
#else
constexpr int kBlockQueries = 1, kBlockVectors = 1;  // a call for every fma: nothing to gain
#endif
constexpr int kWeighPages = kBlockVectors < 2 ? 2 : kBlockVectors;  // taken together by exp_coarse, two by two
constexpr int kSpanPages = kSpan / kPage;
static_assert(kWeighPages % 2 == 0 && kSpanPages % 2 == 0, "pages are weighed in pairs");

// Keys begin .. end - 1 of a span.
struct KeyRange {
  int begin, end;
  STERNA_INLINE bool empty() const { return begin >= end; }
  STERNA_INLINE int first_page() const { return begin / kPage; }
  STERNA_INLINE int end_page() const { return (end + kPage - 1) / kPage; }
};

STERNA_INLINE constexpr int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }
STERNA_INLINE int larger(int64_t a, int64_t b) { return int(a > b ? a : b); }

static KeyRange keys_seen(const Queries& queries, const Span& span, int query) {
  const int64_t end = int64_t(queries.positions[query]) + 1 - span.first_key;
  const KeyRange range{larger(end - queries.window, 0), smaller(end, span.num_keys)};
  return range.empty() ? KeyRange{0, 0} : range;
}

// A span's memory in the order of reading: the keys of each page from `first` to `last`, then the values of each. Decoding waits for memory, so that
// whoever reads a part asks for the one kAhead later, as far as the second cache: the first is small, and has few places for what is on its way.
struct Parts {
  static constexpr int kAhead = 4;
  const uint8_t* at[2 * kSpanPages + kAhead];
  int first, last;

  STERNA_INLINE const uint8_t* const* keys(int page) const { return at + (page < first ? first : page > last ? last : page) - first; }
  STERNA_INLINE const uint8_t* const* values(int page) const { return at + page - first + (last - first + 1); }
};

static Parts parts_of(const Span& span, int dim, KeyRange keys) {
  Parts parts;
  parts.first = keys.first_page(), parts.last = keys.end_page() - 1;
  int n = 0;
  for (int page = parts.first; page <= parts.last; page++) parts.at[n++] = span.pages[page];
  for (int page = parts.first; page <= parts.last; page++) parts.at[n++] = span.pages[page] + size_t(dim) * kPage * 2;
  for (int i = 0; i < Parts::kAhead && n > 0; i++) parts.at[n + i] = parts.at[n - 1];
  return parts;
}

#if defined(STERNA_TILES) && !STERNA_PORTABLE_BF16
#include "attention_tiles.inl"
#else
#include "attention_lanes.inl"
#endif

// p = exp(score - shift) of kPages pages, as bfloat16, and their sum by lanes of pairs.
template <int kPages>
STERNA_INLINE void weigh_pages(const float* scores, Lanes shift, uint16_t* p, Lanes& sum) {
  static constexpr uint16_t kOnes[] = {0x3f80, 0x3f80};
  Lanes x[kPages];
#pragma GCC unroll 8
  for (int i = 0; i < kPages; i++) x[i] = sub(load(scores + i * kPage), shift);
  exp_coarse(x);
#pragma GCC unroll 8
  for (int i = 0; i < kPages; i += 2) {
    const Pairs weights = narrow_pairs(x[i], x[i + 1]);
    store_pairs(p + i * kPage, weights);
    sum = dot_pairs(sum, weights, set1_pairs(kOnes));
  }
}

// What of a page's scores is outside `seen` becomes -inf.
STERNA_INLINE void hide_unseen(float* scores, KeyRange seen, int page) {
  if (page * kPage >= seen.begin && page * kPage + kPage <= seen.end) return;
  const int from = larger(seen.begin - page * kPage, 0), to = smaller(seen.end - page * kPage, kPage);
  const Lanes none = set1(-kInfinity);
  // What lies all outside may never have been computed.
  store(scores + page * kPage, from >= kPage || to <= 0 ? none : select(first(from), none, select(first(to), load(scores + page * kPage), none)));
}

// The largest score of one query over the keys that it sees; other scores become -inf in the pages of these, and in those that fill up the first and
// the last of them to a pair.
static float top_score(float* scores, KeyRange seen) {
  if (seen.empty()) return -kInfinity;
  const int begin = seen.first_page() / 2 * 2, end = (seen.end_page() + 1) / 2 * 2;
  hide_unseen(scores, seen, begin), hide_unseen(scores, seen, begin + 1);
  hide_unseen(scores, seen, end - 2), hide_unseen(scores, seen, end - 1);
  Lanes best[] = {set1(-kInfinity), set1(-kInfinity)};  // two chains are not waited for
  for (int page = begin; page < end; page += 2)
    for (int i = 0; i < 2; i++) best[i] = max(load(scores + (page + i) * kPage), best[i]);
  return reduce_max(max(best[0], best[1]));
}

// p of one query, as bfloat16, for all pages that `tile` touches; returns their sum. m is the query's top score, and what it does not see is -inf.
static float weigh_query(const float* scores, float m, KeyRange seen, KeyRange tile, uint16_t* p) {
  const Lanes shift = set1(m == -kInfinity ? 0.0f : m);  // -inf - -inf would be NaN
  const Pairs none = narrow_pairs(zero(), zero());
  Lanes sum = zero();
  int page = tile.first_page() / 2 * 2;
  const int begin = seen.empty() ? page : seen.first_page() / 2 * 2, end = seen.empty() ? page : (seen.end_page() + 1) / 2 * 2;
  for (; page < begin; page += 2) store_pairs(p + page * kPage, none);
  for (; page + kWeighPages <= end; page += kWeighPages) weigh_pages<kWeighPages>(scores + page * kPage, shift, p + page * kPage, sum);
  for (; page < end; page += 2) weigh_pages<2>(scores + page * kPage, shift, p + page * kPage, sum);
  for (; page < tile.end_page(); page += 2) store_pairs(p + page * kPage, none);
  return reduce_add(sum);
}

static void attend_tile(const Queries& queries, const Span& span, int first, int count, const Partial& out) {
  alignas(64) float scores[kTile * kSpan];
  alignas(64) uint16_t p[kTile * kSpan];
  const int dim = padded_dim(queries.head_dim);
  KeyRange seen[kTile];
  KeyRange keys{kSpan, 0};  // seen by any
  for (int i = 0; i < count; i++) {
    seen[i] = keys_seen(queries, span, first + i);
    if (!seen[i].empty()) keys = {smaller(keys.begin, seen[i].begin), larger(keys.end, seen[i].end)};
  }
  if (keys.empty()) keys = {0, 0};
  const AttentionScope scope(count);
  const Parts parts = parts_of(span, dim, keys);
  score_tile(queries, first, count, parts, scores);
  float *m = out.m + first, *l = out.l + first;
  for (int i = 0; i < count; i++) m[i] = top_score(scores + i * kSpan, seen[i]);
  for (int i = 0; i < count; i++) l[i] = weigh_query(scores + i * kSpan, m[i], seen[i], keys, p + i * kSpan);
  output_tile(p, parts, dim, keys, count, out.o + size_t(first) * dim);
}

static void attend(const Queries& queries, const Span& span, const Partial& out) {
  for (int first = 0; first < queries.count; first += kTile) attend_tile(queries, span, first, smaller(kTile, queries.count - first), out);
}

static void fold(const Partial& into, const Partial& next, int count, int head_dim) {
  const int dim = padded_dim(head_dim);
  for_lanes(count, [&](int first_query, int n) {
    const Lanes m = load(into.m + first_query, n), next_m = load(next.m + first_query, n);
    const Lanes l = load(into.l + first_query, n), next_l = load(next.l + first_query, n);
    const Mask none = less_equal(next_l, zero());
    const Lanes top = max(m, next_m);
    const Lanes a = exp(sub(m, top)), b = exp(sub(next_m, top));
    store(into.m + first_query, select(none, m, top), n);
    store(into.l + first_query, select(none, l, fma(l, a, mul(next_l, b))), n);
    float scale[kLanes], next_scale[kLanes];
    store(scale, a);
    store(next_scale, b);
    for (int i = 0; i < n; i++) {
      if (bits(none) >> i & 1) continue;
      float* o = into.o + size_t(first_query + i) * dim;
      const float* next_o = next.o + size_t(first_query + i) * dim;
      for (int d = 0; d < dim; d += kLanes) store(o + d, fma(load(o + d), set1(scale[i]), mul(load(next_o + d), set1(next_scale[i]))));
    }
  });
}

static void finish(const Partial& from, int count, int head_dim, float* out) {
  const int dim = padded_dim(head_dim);
  for (int i = 0; i < count; i++) {
    const float* o = from.o + size_t(i) * dim;
    const Lanes l = set1(from.l[i]);
    for_lanes(head_dim, [&](int d, int n) STERNA_BODY { store(out + size_t(i) * head_dim + d, div(load(o + d), l), n); });
  }
}

static void to_query(const float* q, int head_dim, uint16_t* out) {
  for_lanes(head_dim, [&](int d, int n) STERNA_BODY { store_halves(out + d, narrow(load(q + d, n))); });
}

// Stores a slot's own bytes and nothing beside them: another thread may be writing the neighbour.
static void store_kv(const float* k, const float* v, int head_dim, int slot, uint8_t* page) {
  const int dim = padded_dim(head_dim);
  uint16_t* keys = reinterpret_cast<uint16_t*>(page);
  uint16_t* values = keys + dim * kPage + (slot / 2 * dim * 2 + slot % 2);
  Lanes zeros = zero();  // zero times a number is zero; times an infinity or NaN it is NaN
  for_lanes(head_dim, [&](int d, int n) STERNA_BODY { zeros = fma(widen(narrow(load(v + d, n))), zero(), zeros); });
  const bool finite = reduce_add(zeros) == 0.0f;
  for_lanes(head_dim, [&](int d, int n) {
    uint16_t key[kLanes], value[kLanes];
    store_halves(key, narrow(finite ? load(k + d, n) : set1(__builtin_nanf(""))));
    store_halves(value, narrow(finite ? load(v + d, n) : zero()));
    for (int i = 0; i < kLanes; i += 2) __builtin_memcpy(keys + (d + i) * kPage + slot * 2, key + i, 4);
    for (int i = 0; i < kLanes; i++) values[(d + i) * 2] = value[i];
  });
}

static void fill_attention(Kernels& k) {
  k.to_query = to_query;
  k.store_kv = store_kv;
  k.attend = attend;
  k.fold = fold;
  k.finish = finish;
}
