// What this machine can do at most: reading memory, and multiply-add rates of each instruction set that it has.
//
// Built with any C++17 compiler and no flags but -O3 and threads: each instruction set's loop is compiled for it by attribute and run only where the
// processor and the system have it. One multiply-add counts as two operations. Every loop keeps enough independent accumulators in
// registers to fill the pipelines, and reads no memory.
//
// usage: ceilings THREADS SECONDS        prints one line of JSON
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

using Clock = std::chrono::steady_clock;
int threads = 1;
double seconds = 0.3;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs `work` (which returns how much it did) on all threads again and again for a third of `seconds`; gives what all did in a second.
double one_rate(const std::function<double(int thread)> &work) {
  std::atomic<int> waiting{threads};
  std::vector<double> per_second(threads);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; thread++)
    all.emplace_back([&, thread] {
      work(thread);
      waiting--;
      while (waiting > 0) std::this_thread::yield();
      const auto start = Clock::now();
      double done = 0;
      do done += work(thread);
      while (since(start) < seconds / 3);
      per_second[thread] = done / since(start);
    });
  double sum = 0;
  for (int thread = 0; thread < threads; thread++) {
    all[thread].join();
    sum += per_second[thread];
  }
  return sum;
}

// The best of three: whatever disturbs a ceiling lowers it.
double rate(const std::function<double(int thread)> &work) {
  double best = 0;
  for (int i = 0; i < 3; i++) best = std::max(best, one_rate(work));
  return best;
}

// Stops the compiler from leaving a loop's results out.
template <class T> void keep(const T &value) { asm volatile("" : : "r"(&value) : "memory"); }

constexpr long kRounds = 20000, kTileRounds = 4000;

template <class T> void keep_copy(T value) { keep(value); }

// The one timing loop: `rounds` times all of `kSums` sums, each taking one multiply-add of `operations` by `step`. Compiled into its caller, and so for the caller's
// instruction set. Each sum is a variable of its own whose address nobody has: those of an array stay in memory, and storing them halves every rate.
template <int kSums, class Sum, class Step, class... Sums>
__attribute__((always_inline)) inline double repeat(long rounds, double operations, const Step &step, Sums... sums) {
  if constexpr (sizeof...(Sums) < kSums) {
    return repeat<kSums, Sum>(rounds, operations, step, sums..., Sum{});
  } else {
    for (long i = 0; i < rounds; i++) (step(sums), ...);
    (keep_copy(sums), ...);
    return rounds * kSums * operations;
  }
}

// Plain loops, vectorized as the compiler sees fit for the oldest processor of this architecture.
struct Ints {
  int32_t lanes[64];
};
struct Floats {
  float lanes[64];
};

double portable_int8(int) {
  alignas(64) static const int8_t a[64] = {1, 2, 3}, b[64] = {3, 2, 1};
  keep(a), keep(b);
  return repeat<1, Ints>(kRounds, 64 * 2, [&](Ints &sum) {
    for (int j = 0; j < 64; j++) sum.lanes[j] += a[j] * b[j];
    keep(sum);
  });
}

double portable_fp32(int) {
  Floats x, y;
  for (int j = 0; j < 64; j++) x.lanes[j] = 1.0f, y.lanes[j] = 0.5f;
  keep(x), keep(y);
  return repeat<1, Floats>(kRounds, 64 * 2, [&](Floats &sum) {
    for (int j = 0; j < 64; j++) sum.lanes[j] += x.lanes[j] * y.lanes[j];
    keep(sum);
  });
}

#if defined(__x86_64__)

// An instruction set's functions and the steps in them: they are compiled for it, whatever the rest is compiled for.
#define FOR(instructions) __attribute__((target(instructions)))
// Stops the compiler from leaving a step out, or from gathering several in one.
#define HOLD(vector) asm volatile("" : "+v"(vector))

FOR("avx2,fma") double avx2_fp32(int) {
  const __m256 x = _mm256_set1_ps(1.0f), y = _mm256_set1_ps(0.5f);
  return repeat<10, __m256>(kRounds, 8 * 2, [&](__m256 &sum) FOR("avx2,fma") {
    sum = _mm256_fmadd_ps(x, y, sum);
    HOLD(sum);
  });
}

FOR("avx2") double avx2_int8(int) {
  const __m256i x = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  return repeat<8, __m256i>(kRounds, 32 * 2, [&](__m256i &sum) FOR("avx2") {
    __m256i pairs = _mm256_maddubs_epi16(x, x);
    HOLD(pairs);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    HOLD(sum);
  });
}

FOR("avx512f") double avx512_fp32(int) {
  const __m512 x = _mm512_set1_ps(1.0f), y = _mm512_set1_ps(0.5f);
  return repeat<12, __m512>(kRounds, 16 * 2, [&](__m512 &sum) FOR("avx512f") {
    sum = _mm512_fmadd_ps(x, y, sum);
    HOLD(sum);
  });
}

FOR("avx512f,avx512vnni") double avx512_int8(int) {
  const __m512i x = _mm512_set1_epi8(1);
  return repeat<12, __m512i>(kRounds, 64 * 2, [&](__m512i &sum) FOR("avx512f,avx512vnni") {
    sum = _mm512_dpbusd_epi32(sum, x, x);
    HOLD(sum);
  });
}

FOR("avx512f,avx512bf16") double avx512_bf16(int) {
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3F80);
  return repeat<12, __m512>(kRounds, 32 * 2, [&](__m512 &sum) FOR("avx512f,avx512bf16") {
    sum = _mm512_dpbf16_ps(sum, x, x);
    HOLD(sum);
  });
}

// Two tiles of A by two of B, each product into an accumulator of its own.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

struct Tiles {};  // all of them: they are registers that have no type

FOR("amx-tile") void load_tiles() {
  TileConfig config;
  asm volatile("ldtilecfg %0" : : "m"(config));
  static const uint8_t zeros[1024] = {};
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

FOR("amx-tile,amx-int8") double amx_int8(int) {
  load_tiles();
  const double done = repeat<1, Tiles>(kTileRounds, 4 * 16 * 16 * 64 * 2, [](Tiles &) FOR("amx-tile,amx-int8") {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  });
  _tile_release();
  return done;
}

FOR("amx-tile,amx-bf16") double amx_bf16(int) {
  load_tiles();
  const double done = repeat<1, Tiles>(kTileRounds, 4 * 16 * 16 * 32 * 2, [](Tiles &) FOR("amx-tile,amx-bf16") {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  });
  _tile_release();
  return done;
}

struct Has {
  bool avx2 = false, avx512 = false, vnni = false, bf16 = false, amx_int8 = false, amx_bf16 = false;
};

Has processor() {
  Has has;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return has;
  const bool fma = c & bit_FMA;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool ymm = (low & 0x6) == 0x6, zmm = (low & 0xE6) == 0xE6, tiles = (low & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
  has.avx2 = ymm && fma && (b & (1u << 5));
  has.avx512 = zmm && (b & (1u << 16)) && (b & (1u << 30));
  has.vnni = has.avx512 && (c & (1u << 11));
  bool granted = false;
#if defined(__linux__)
  granted = tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#endif
  has.amx_bf16 = granted && (d & (1u << 22));
  has.amx_int8 = granted && (d & (1u << 25));
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) has.bf16 = has.avx512 && (a & (1u << 5));
  return has;
}

#endif

// Gigabytes a second that all threads together read, each its own part of `megabytes`.
double read_gb_s(int megabytes) {
  const size_t words = size_t(megabytes) * 1000000 / 8 / threads / 16 * 16;
  std::vector<std::unique_ptr<uint64_t[]>> parts(threads);
  std::vector<std::thread> fillers;
  for (int thread = 0; thread < threads; thread++)
    fillers.emplace_back([&, thread] {
      parts[thread].reset(new uint64_t[words]);
      for (size_t i = 0; i < words; i++) parts[thread][i] = i;
    });
  for (auto &filler : fillers) filler.join();
  return rate([&](int thread) {
           const uint64_t *at = parts[thread].get();
           uint64_t sums[16] = {};
           for (size_t i = 0; i < words; i += 16)
             for (int j = 0; j < 16; j++) sums[j] += at[i + j];
           keep(sums);
           return words * 8.0;
         }) /
         1e9;
}

void print(const char *type, const std::vector<std::pair<const char *, double (*)(int)>> &loops) {
  std::printf(", \"%s\": {", type);
  for (size_t i = 0; i < loops.size(); i++)
    std::printf("%s\"%s\": %.4f", i ? ", " : "", loops[i].first, rate(loops[i].second) / 1e12);
  std::printf("}");
}

}  // namespace

int main(int count, char **words) {
  if (count != 3 || (threads = std::atoi(words[1])) < 1 || !((seconds = std::atof(words[2])) > 0)) {
    std::fprintf(stderr, "usage: %s THREADS SECONDS\n", words[0]);
    return 2;
  }
  std::vector<std::pair<const char *, double (*)(int)>> int8{{"portable", portable_int8}}, fp32{{"portable", portable_fp32}}, bf16;
#if defined(__x86_64__)
  const Has has = processor();
  if (has.avx2) int8.push_back({"avx2", avx2_int8}), fp32.push_back({"avx2", avx2_fp32});
  if (has.avx512) fp32.push_back({"avx512", avx512_fp32});
  if (has.vnni) int8.push_back({"avx512", avx512_int8});
  if (has.bf16) bf16.push_back({"avx512", avx512_bf16});
  if (has.amx_int8) int8.push_back({"amx", amx_int8});
  if (has.amx_bf16) bf16.push_back({"amx", amx_bf16});
#endif
  std::printf("{\"threads\": %d, \"read_gb_s\": {\"64 MB\": %.1f, \"512 MB\": %.1f}", threads, read_gb_s(64), read_gb_s(512));
  print("int8_tops", int8);
  print("bf16_tflops", bf16);
  print("fp32_tflops", fp32);
  std::printf("}\n");
}
