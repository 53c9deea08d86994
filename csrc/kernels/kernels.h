// The kernels: what each computes, and to which bits. One table of functions per instruction set (isa_*.cpp), chosen at run time (dispatch.h).
//
// Exactness. Every function's result for a row (a query, a token) is a pure function of that row's inputs: never of how many rows are computed
// together, of how work is cut among calls or threads, or of the instruction set. This holds by construction:
//   - integer sums are exact, so their order is free;
//   - every float operation is written down here or in lanes.h in one order: sums run over 16 lanes (lane i takes elements i, i + 16, ...) and are
//     reduced by one tree; multiply-adds are fused; division and square root are IEEE; there is one exp;
//   - products of bfloat16 are pairs, the odd element fused first: acc = fma(a[2i], b[2i], fma(a[2i+1], b[2i+1], acc)), which is what vdpbf16ps
//     computes, with subnormal inputs and outputs as zero;
//   - callers compute inside a `FlushSubnormals` scope (flush.h).
// The exception is `amx`: its bfloat16 tiles, attention's too, sum in an order of their own. Kernels::portable_bf16 says so; `--arithmetic portable`
// avoids them.
//
// Nothing here checks its arguments: the engine checks shapes and bounds once per call.
#pragma once

#include "matrix.h"
#include "philox.h"

namespace sterna {

enum class Activation : uint8_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

constexpr int kPage = 16;       // key/value slots of a page
constexpr int kSpan = 256;      // keys that attention takes together, aligned to positions
constexpr int kNoWindow = 0x7fffffff;

// Keys and values of one page and one key head: K as [padded_dim / 2][16 slots][2 dims] and then V as [8 pairs of slots][padded_dim][2 slots],
// bfloat16. padded_dim is head_dim rounded up to 16; the padding of K and V is zero. A page of one layer holds its heads one after another.
STERNA_INLINE constexpr int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
STERNA_INLINE constexpr size_t page_head_bytes(int head_dim) { return size_t(padded_dim(head_dim)) * kPage * 2 * 2; }

// Attention of queries over one span of keys: the keys at positions first_key .. first_key + num_keys - 1, first_key a multiple of kSpan,
// 1 <= num_keys <= kSpan. Slots behind num_keys hold anything, NaN included, and have no influence; so do slots before the first key that any query
// sees, whose pages are not read at all. Between the first key and the last that are seen by some query, values must be finite (store_kv sees to that):
// to those who don't see them they are weighed by 0.
struct Span {
  const uint8_t* const* pages;  // [ceil(num_keys / 16)]: this key head's part of each page
  int32_t first_key;
  int32_t num_keys;
};

// Queries that read the same span: heads of one token, tokens of one row, rows that share a prefix.
struct Queries {
  const uint16_t* q;         // bfloat16 [count][padded_dim], padding zero
  const int32_t* positions;  // [count]: a query sees keys at positions in (position - window, position]
  int32_t count;
  int32_t head_dim;
  int32_t window;  // kNoWindow for all
  float scale;
  float softcap;  // 0 for none
};

// What attention over some keys comes to. m: the largest score (-inf where no key was seen), l: sum of exp(score - m), o: sum of exp(score - m) * v.
struct Partial {
  float* m;  // [count]
  float* l;  // [count]
  float* o;  // [count][padded_dim]
};

struct Maximum {
  float value;    // -inf where all are
  int32_t index;  // the lowest that has it
  bool has_nan;
};

// Which tokens may still win a draw (engine/sampler.h): the noise of a token, -ln(-ln u) with u in (0, 1) from the top 24 bits of its word, is at most
// -ln(1 - u). So one whose noise reaches t has 1 - u <= exp(-t); with t = score - z and a cheap upper bound of exp, that leaves a handful of tokens
// to compute logarithms for. A token is a contender unless float(2^24 - 1 - (word >> 8)) + 0.5 > b, where
// b = the float with bits int(min(max(fma(x - maximum, slope, offset), 0), kMaxBound)): straight lines between powers of two, above 2^y everywhere.
struct Race {
  PhiloxStream stream;
  float maximum;  // of x
  float slope;    // 2^23 * log2(e) / temperature
  float offset;   // 2^23 * (127 + 24 - score * log2(e) + a margin for the rounding of all this)
};
constexpr float kMaxBound = 1.5e9f;  // bits of a float beyond any 24-bit number

struct Contender {
  int32_t token;
  uint32_t word;
};

struct Mass {
  double sum;
  int32_t count;
};

// Memory that will be read before long, part by part: part i is the `bytes` from base + parts[i] * stride on, of `count` that are left. Products that
// take their rows in several passes find the weights in the cache from the second on, and memory idle: they ask for this meanwhile, and it comes as
// far as the second cache, from where it moves on to the third. Where it comes changes nothing but the time.
struct Ahead {
  const uint8_t* base = nullptr;
  size_t stride = 0, bytes = 0;
  const int32_t* parts = nullptr;
  int32_t count = 0;
  const uint8_t *at = nullptr, *end = nullptr;  // what is left of the part before them
};

struct Kernels {
  const char* name;
  bool portable_bf16;  // bfloat16 products in the order above
  int rows_at_once = 0;  // of an int format's `matmul`, which asks for what is ahead where there are more; 0 where it never does

  // ---- activations for `matmul` ----
  void (*quantize)(const float* x, int cols, uint8_t* groups);  // the groups of a row of int8 Activations, or of whole groups of it
  void (*refine)(const float* x, int cols, uint8_t* row);       // the refinements of a row whose groups are there
  void (*to_bf16)(const float* x, int cols, uint8_t* row);      // a row of Activations, bfloat16, or some columns of it from an even one on

  // y[r * y_stride + 16 * b + i] = row 16 * b + i of W x, for rows r of x in first_row .. + num_rows and blocks b of w in first_block .. + num_blocks.
  // Rows of y hold padded_rows() (the padding's outputs are zero, or NaN where x is). x as w.quant asks. int formats: per group ascending, and then
  // per refinement (matrix.h) with its group's weights, acc = fma(float(dot - zero * sum q), D * d, acc), and with has_min: acc = fma(float(dot),
  // D * d, acc), then acc = fma(M, s, acc); with scale_group 16 the two halves of a group one after the other, each as a group of its own (its s is
  // s16). acc starts at +0. `ahead` is what is left of it afterwards.
  void (*matmul)(const Matrix& w, const Activations& x, int first_row, int num_rows, int first_block, int num_blocks, float* y, size_t y_stride,
                 Ahead& ahead);

  // out[cols] = row `row` of w in float32: d * q + m (fused), d * (q - zero), or the bfloat16. out has room for padded_cols(); the padding is zero.
  void (*dequantize_row)(const Matrix& w, int row, float* out);

  // ---- rows of float32; n is any number, x and y may be the same ----
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);  // y = (x * r) * weight, r = 1 / sqrt(mean(x^2) + eps)
  void (*add)(float* x, const float* y, int n);                                       // x += y
  void (*add_scaled)(float* x, const float* y, float scale, int n);                   // x = fma(y, scale, x)
  void (*scale)(float* x, float factor, int n);                                       // x *= factor
  void (*softcap)(float* x, float cap, int n);                                        // x = cap * tanh(x / cap)
  void (*gated)(const float* gate, const float* up, int n, Activation activation, float* y);  // y = act(gate) * up
  // Rotate the first 2 * half elements of each of `heads` heads of x (head_dim apart): (a, b) = (x[i], x[i + half]) becomes
  // (fma(a, c, -(b * s)), fma(b, c, a * s)), c = cosines[i], s = sines[i].
  void (*rope)(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines);

  // ---- attention ----
  void (*to_query)(const float* q, int head_dim, uint16_t* out);  // bfloat16, padded with zeros
  // Write one token's k and v [head_dim] of one key head into slot `slot` (0 .. 15) of its page. Where v, rounded, has a NaN or an infinity, k is
  // stored as NaN and v as zeros: so whoever sees the token has NaN, and nobody else.
  void (*store_kv)(const float* k, const float* v, int head_dim, int slot, uint8_t* page);
  // score = (q . k in bfloat16 pairs over ascending dims) * scale, softcapped; p = exp_coarse(score - m) rounded to bfloat16; l sums those p over lanes
  // (lane = key / 2 % 16, pairs of keys ascending as products with one, one tree); o takes pairs of keys ascending. Without portable_bf16 q . k is summed
  // 32 dims at a time (the last may be 16), and o page by page, both ascending, and within these in the processor's order.
  void (*attend)(const Queries& queries, const Span& span, const Partial& out);
  // Merge: m' = max(m, n.m), a = exp(m - m'), b = exp(n.m - m'), l = fma(l, a, n.l * b), o = fma(o, a, n.o * b). Spans are folded in ascending order,
  // starting from m = -inf, l = 0, o = 0; a partial that saw no key changes nothing.
  void (*fold)(const Partial& into, const Partial& next, int count, int head_dim);
  void (*finish)(const Partial& from, int count, int head_dim, float* out);  // out[count][head_dim] = o / l

  // ---- logits ----
  Maximum (*maximum)(const float* x, int n);
  double (*exp_sum)(const float* x, int n, float maximum);  // sum of exp(x - maximum): float32 in 16 lanes per 1,024 elements, those in double ascending
  // The sum of exp((x - maximum) * factor) over the elements >= cut, summed as exp_sum does, and how many they are.
  Mass (*mass_at_least)(const float* x, int n, float maximum, float factor, float cut);
  // The numbers of the blocks of four elements (element i lies in block i / 4) that hold one >= cut, ascending; returns how many. `blocks` has room
  // for n / 4 + 16. x holds no NaN.
  int (*blocks_at_least)(const float* x, int n, float cut, int32_t* blocks);
  // The contenders among the tokens of `count` blocks (token 4 * b + j of block b, where below n), in the blocks' order; returns how many.
  // `contenders` has room for 4 * count.
  int (*race)(const Race& race, const float* x, int n, const int32_t* blocks, int count, Contender* contenders);
};

}  // namespace sterna
