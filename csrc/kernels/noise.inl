// Finding the few tokens that can win a draw: see Race in kernels.h.

// The definition, for one token.
STERNA_INLINE static bool is_contender(const Race& race, float x, uint32_t word) {
  float bits = __builtin_fmaf(x - race.maximum, race.slope, race.offset);
  bits = bits > 0 ? bits : 0;
  bits = bits < kMaxBound ? bits : kMaxBound;
  const int32_t whole = int32_t(bits);
  float bound;
  __builtin_memcpy(&bound, &whole, sizeof bound);
  return float(int32_t(0xFFFFFF - (word >> 8))) + 0.5f <= bound;
}

static int race_block(const Race& race, const float* x, int n, int32_t block, Contender* contenders) {
  uint32_t words[4];
  philox_block(race.stream, uint32_t(block), words);
  int found = 0;
  for (int j = 0; j < 4; ++j) {
    const int token = 4 * block + j;
    if (token < n && is_contender(race, x[token], words[j])) contenders[found++] = {token, words[j]};
  }
  return found;
}

#if defined(STERNA_LANES_AVX512) || defined(STERNA_LANES_AVX2)

// Words: one 32-bit word of each of eight blocks, in the low halves of 64 bits; what the high halves hold has no influence.
// Sixteen: 16 words of 32 bits.
#if defined(STERNA_LANES_AVX512)
using Words = __m512i;
using Sixteen = __m512i;

STERNA_INLINE static Words every(uint32_t word) { return _mm512_set1_epi64(int64_t(word)); }
// In an order that `by_token` undoes.
STERNA_INLINE static Words first_words(const int32_t* blocks) {
  const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(blocks));
  return _mm512_cvtepu32_epi64(_mm256_permutevar8x32_epi32(numbers, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
STERNA_INLINE static Words multiply(Words a, Words b) { return _mm512_mul_epu32(a, b); }
STERNA_INLINE static Words high_xor(Words product, Words b, Words c) {
  return _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), b, c, 0x96);
}
STERNA_INLINE static void by_token(const Words w[4], Sixteen* low, Sixteen* high) {
  const __m512i front = _mm512_mask_blend_epi32(0xAAAA, w[0], _mm512_slli_epi64(w[1], 32));
  const __m512i back = _mm512_mask_blend_epi32(0xAAAA, w[2], _mm512_slli_epi64(w[3], 32));
  *low = _mm512_unpacklo_epi64(front, back);
  *high = _mm512_unpackhi_epi64(front, back);
}
STERNA_INLINE static Lanes load_blocks(const float* x, const int32_t* blocks) {
  __m512 of = _mm512_castps128_ps512(_mm_loadu_ps(x + 4 * blocks[0]));
  of = _mm512_insertf32x4(of, _mm_loadu_ps(x + 4 * blocks[1]), 1);
  of = _mm512_insertf32x4(of, _mm_loadu_ps(x + 4 * blocks[2]), 2);
  return {_mm512_insertf32x4(of, _mm_loadu_ps(x + 4 * blocks[3]), 3)};
}
STERNA_INLINE static Lanes with_bits(Lanes whole) { return {_mm512_castsi512_ps(_mm512_cvttps_epi32(whole.v))}; }
STERNA_INLINE static Lanes rest_of(Sixteen words) {  // 2^24 - 1 - (word >> 8)
  return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_ternarylogic_epi32(words, words, words, 0x0F), 8))};
}
STERNA_INLINE static void store_words(uint32_t* p, Sixteen words) { _mm512_storeu_si512(p, words); }
#else
struct Words {
  __m256i a, b;  // four blocks each
};
struct Sixteen {
  __m256i lo, hi;
};

STERNA_INLINE static Words every(uint32_t word) { return {_mm256_set1_epi64x(int64_t(word)), _mm256_set1_epi64x(int64_t(word))}; }
STERNA_INLINE static __m256i first_words_of_four(const int32_t* blocks) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks));
  return _mm256_cvtepu32_epi64(_mm_shuffle_epi32(numbers, _MM_SHUFFLE(3, 1, 2, 0)));
}
STERNA_INLINE static Words first_words(const int32_t* blocks) { return {first_words_of_four(blocks), first_words_of_four(blocks + 4)}; }
STERNA_INLINE static Words multiply(Words x, Words y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
STERNA_INLINE static __m256i high_xor_of_four(__m256i product, __m256i b, __m256i c) {
  return _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product, 32), b), c);
}
STERNA_INLINE static Words high_xor(Words product, Words b, Words c) {
  return {high_xor_of_four(product.a, b.a, c.a), high_xor_of_four(product.b, b.b, c.b)};
}
STERNA_INLINE static Sixteen by_token_of_four(__m256i w0, __m256i w1, __m256i w2, __m256i w3) {
  const __m256i front = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xAA);
  const __m256i back = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xAA);
  return {_mm256_unpacklo_epi64(front, back), _mm256_unpackhi_epi64(front, back)};
}
STERNA_INLINE static void by_token(const Words w[4], Sixteen* low, Sixteen* high) {
  *low = by_token_of_four(w[0].a, w[1].a, w[2].a, w[3].a);
  *high = by_token_of_four(w[0].b, w[1].b, w[2].b, w[3].b);
}
STERNA_INLINE static __m256 load_two_blocks(const float* x, const int32_t* blocks) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 4 * blocks[0])), _mm_loadu_ps(x + 4 * blocks[1]), 1);
}
STERNA_INLINE static Lanes load_blocks(const float* x, const int32_t* blocks) { return {load_two_blocks(x, blocks), load_two_blocks(x, blocks + 2)}; }
STERNA_INLINE static Lanes with_bits(Lanes whole) {
  return {_mm256_castsi256_ps(_mm256_cvttps_epi32(whole.lo)), _mm256_castsi256_ps(_mm256_cvttps_epi32(whole.hi))};
}
STERNA_INLINE static __m256 rest_of_eight(__m256i words) {
  return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_xor_si256(words, _mm256_set1_epi32(-1)), 8));
}
STERNA_INLINE static Lanes rest_of(Sixteen words) { return {rest_of_eight(words.lo), rest_of_eight(words.hi)}; }
STERNA_INLINE static void store_words(uint32_t* p, Sixteen words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), words.hi);
}
#endif

STERNA_INLINE static void philox_blocks(const PhiloxStream& stream, const int32_t* blocks, Sixteen* low, Sixteen* high) {
  const Words m0 = every(kPhiloxMultiplier0), m1 = every(kPhiloxMultiplier1);
  Words c[4] = {first_words(blocks), every(stream.output_index), every(0), every(0)};
  uint32_t k0 = stream.key[0], k1 = stream.key[1];
#pragma GCC unroll 10
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Words p0 = multiply(m0, c[0]), p1 = multiply(m1, c[2]);
    c[0] = high_xor(p1, c[1], every(k0));
    c[2] = high_xor(p0, c[3], every(k1));
    c[1] = p1;
    c[3] = p0;
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  by_token(c, low, high);
}

STERNA_INLINE static int race_four_blocks(const Race& race, const float* x, const int32_t* blocks, Sixteen words, Contender* contenders) {
  const Lanes shifted = sub(load_blocks(x, blocks), set1(race.maximum));
  const Lanes bound = with_bits(min(max(fma(shifted, set1(race.slope), set1(race.offset)), zero()), set1(kMaxBound)));
  uint32_t found = bits(less_equal(add(rest_of(words), set1(0.5f)), bound));
  if (__builtin_expect(found == 0, 1)) return 0;
  uint32_t word[16];
  store_words(word, words);
  int count = 0;
  for (; found != 0; found &= found - 1) {
    const int i = __builtin_ctz(found);
    contenders[count++] = {4 * blocks[i / 4] + i % 4, word[i]};
  }
  return count;
}

static int race(const Race& race, const float* x, int n, const int32_t* blocks, int count, Contender* contenders) {
  int found = 0, first = 0;
  for (; first + 8 <= count && 4 * blocks[first + 7] + 4 <= n; first += 8) {
    Sixteen low, high;
    philox_blocks(race.stream, blocks + first, &low, &high);
    found += race_four_blocks(race, x, blocks + first, low, contenders + found);
    found += race_four_blocks(race, x, blocks + first + 4, high, contenders + found);
  }
  for (; first < count; ++first) found += race_block(race, x, n, blocks[first], contenders + found);
  return found;
}

#else

static int race(const Race& race, const float* x, int n, const int32_t* blocks, int count, Contender* contenders) {
  int found = 0;
  for (int b = 0; b < count; ++b) found += race_block(race, x, n, blocks[b], contenders + found);
  return found;
}

#endif

// Bit b of the result: of x[64], block b holds one >= cut.
#if defined(STERNA_LANES_AVX512)
STERNA_INLINE static uint32_t sixteen_blocks_at_least(const float* x, Lanes cut) {
  uint64_t any = 0;
  for (int i = 0; i < 4; ++i) any |= uint64_t(bits(less_equal(cut, load(x + 16 * i)))) << (16 * i);
  any |= any >> 1;
  any |= any >> 2;
  any &= 0x1111111111111111;
  any = (any | any >> 3) & 0x0303030303030303;
  any = (any | any >> 6) & 0x000F000F000F000F;
  any = (any | any >> 12) & 0x000000FF000000FF;
  return uint32_t((any | any >> 24) & 0xFFFF);
}
#endif

static int blocks_at_least(const float* x, int n, float cut, int32_t* blocks) {
  int count = 0, block = 0;
#if defined(STERNA_LANES_AVX512)
  __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (const Lanes cuts = set1(cut); 4 * block + 64 <= n; block += 16) {
    const uint32_t found = sixteen_blocks_at_least(x + 4 * block, cuts);
    _mm512_storeu_si512(blocks + count, _mm512_maskz_compress_epi32(__mmask16(found), numbers));
    count += __builtin_popcount(found);
    numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
  }
#endif
  for (; 4 * block + 4 <= n; ++block) {
    const float* of = x + 4 * block;
    blocks[count] = block;
#if defined(STERNA_LANES_AVX2)
    count += _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(of), _mm_set1_ps(cut))) != 0;
#else
    count += (of[0] >= cut) | (of[1] >= cut) | (of[2] >= cut) | (of[3] >= cut);
#endif
  }
  bool last = false;
  for (int i = 4 * block; i < n; ++i) last |= x[i] >= cut;
  if (last) blocks[count++] = block;
  return count;
}

static Mass mass_at_least(const float* x, int n, float maximum, float factor, float cut) {
  constexpr int kChunk = 1024;
  Mass total{0, 0};
  for (int start = 0; start < n; start += kChunk) {
    const float* chunk = x + start;
    Lanes sum = zero();
    for_lanes(n - start < kChunk ? n - start : kChunk, [&](int i, int count) STERNA_BODY {
      const Lanes value = load(chunk + i, count);
      const Mask counts = both(first(count), less_equal(set1(cut), value));
      sum = add(sum, select(counts, exp(mul(sub(value, set1(maximum)), set1(factor))), zero()));
      total.count += __builtin_popcount(bits(counts));
    });
    total.sum += double(reduce_add(sum));
  }
  return total;
}

static void fill_noise(Kernels& k) {
  k.mass_at_least = mass_at_least;
  k.blocks_at_least = blocks_at_least;
  k.race = race;
}
