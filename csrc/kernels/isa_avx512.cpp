// The kernels for `avx512`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#include "lanes.h"
#include "kernels.h"

namespace sterna {
namespace {
#include "activations.inl"
#include "attention.inl"
#include "logits.inl"
#include "matmul_avx512.inl"
#include "rows.inl"
}  // namespace

// Called only where the processor has these instructions; a static initializer would run everywhere.
void make_kernels_avx512(Kernels& k) {
  k.name = "avx512";
  k.portable_bf16 = true;
  fill_activations(k);
  fill_attention(k);
  fill_logits(k);
  fill_matmul(k);
  fill_rows(k);
}

}  // namespace sterna
