// Finding the few tokens that can win a draw: see Race in kernels.h.

// Sixteen blocks of a stream side by side: words[j][i] is word j of block blocks[i].
static void philox_blocks(const PhiloxStream& stream, const int32_t* blocks, uint32_t words[4][16]) {
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int i = 0; i < 16; ++i) c0[i] = uint32_t(blocks[i]), c1[i] = stream.output_index, c2[i] = 0, c3[i] = 0;
  uint32_t k0 = stream.key[0], k1 = stream.key[1];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t p0 = uint64_t(kPhiloxMultiplier0) * c0[i], p1 = uint64_t(kPhiloxMultiplier1) * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(p1);
      c3[i] = uint32_t(p0);
    }
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  for (int i = 0; i < 16; ++i) words[0][i] = c0[i], words[1][i] = c1[i], words[2][i] = c2[i], words[3][i] = c3[i];
}

STERNA_INLINE static bool is_contender(const Race& race, float x, uint32_t word) {
  float bits = __builtin_fmaf(x - race.maximum, race.slope, race.offset);
  bits = bits > 0 ? bits : 0;
  bits = bits < kMaxBound ? bits : kMaxBound;
  const int32_t whole = int32_t(bits);
  float bound;
  __builtin_memcpy(&bound, &whole, sizeof bound);
  return float(int32_t(0xFFFFFF - (word >> 8))) + 0.5f <= bound;
}

static int race_blocks(const Race& race, const float* x, int n, const int32_t* blocks, int count, Contender* contenders) {
  int found = 0;
  for (int first = 0; first < count; first += 16) {
    int32_t numbers[16] = {};
    const int some = count - first < 16 ? count - first : 16;
    for (int i = 0; i < some; ++i) numbers[i] = blocks[first + i];
    uint32_t words[4][16];
    philox_blocks(race.stream, numbers, words);
    for (int i = 0; i < some; ++i) {
      for (int j = 0; j < 4; ++j) {
        const int token = 4 * numbers[i] + j;
        if (token < n && is_contender(race, x[token], words[j][i])) contenders[found++] = {token, words[j][i]};
      }
    }
  }
  return found;
}

static int blocks_at_least(const float* x, int n, float cut, int32_t* blocks) {
  int count = 0, block = 0;
  for (; 4 * block + 4 <= n; ++block) {
    const float* of = x + 4 * block;
    blocks[count] = block;
    count += (of[0] >= cut) | (of[1] >= cut) | (of[2] >= cut) | (of[3] >= cut);
  }
  bool last = false;
  for (int i = 4 * block; i < n; ++i) last |= x[i] >= cut;
  if (last) blocks[count++] = block;
  return count;
}

static Maximum plain_maximum(const float* x, int n) {
  Maximum m{-__builtin_inff(), 0, false};
  for (int i = 0; i < n; ++i) {
    if (x[i] != x[i]) m.has_nan = true;
    if (x[i] > m.value) m.value = x[i], m.index = i;
  }
  return m;
}
static double plain_exp_sum(const float* x, int n, float maximum) {
  double s = 0;
  for (int i = 0; i < n; ++i) s += __builtin_exp(double(x[i] - maximum));
  return s;
}
static void fill_noise(Kernels& k) {
  k.blocks_at_least = blocks_at_least;
  if (!k.maximum) k.maximum = plain_maximum, k.exp_sum = plain_exp_sum;
  k.race = race_blocks;
}
