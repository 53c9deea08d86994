// How far ahead of use weights are asked for. One row reads faster than that by the processor's own prediction.
constexpr int kBf16AheadBytes = 8 << 10;

// bfloat16 products over lanes, up to kRows_ rows. Two blocks at once where that is up to kSums sums, for each waits for the one before it; else one,
// which reads memory faster.
template <int kRows_, int kSums>
struct Bf16Panel {
  static constexpr int kRows = kRows_;

  template <int kCount>
  static void run(const Product& p) {
    constexpr int kBlocks = 2 * kCount <= kSums ? 2 : 1;
    int block = p.first_block;
    const int end = block + p.num_blocks;
    for (; block + kBlocks <= end; block += kBlocks) blocks<kCount, kBlocks>(p, block);
    for (; block < end; block++) blocks<kCount, 1>(p, block);
  }

  template <int kCount, int kBlocks>
  STERNA_INLINE static void blocks(const Product& p, int block) {
    Lanes acc[kBlocks][kCount];
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; b++) {
#pragma GCC unroll 12
      for (int r = 0; r < kCount; r++) acc[b][r] = zero();
    }
    const uint8_t* weights = p.w.block(block);
    const size_t block_bytes = p.w.block_bytes();
    for (int pair = 0; pair < p.w.padded_cols() / 2; pair++, weights += 64) {
      Pairs w[kBlocks];
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b++) {
        if constexpr (kCount > 1) __builtin_prefetch(weights + b * block_bytes + kBf16AheadBytes, 0, 2);
        w[b] = load_pairs(weights + b * block_bytes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kCount; r++) {
        const Pairs x = set1_pairs(p.bf16s(r) + 2 * pair);
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; b++) acc[b][r] = dot_pairs(acc[b][r], w[b], x);
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; b++) {
#pragma GCC unroll 12
      for (int r = 0; r < kCount; r++) store(p.out(r, block + b), acc[b][r]);
    }
  }
};
