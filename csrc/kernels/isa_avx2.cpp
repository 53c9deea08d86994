// The kernels for `avx2`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX2 1
#include "lanes.h"
#include "kernels.h"

namespace sterna {
namespace {
#include "activations.inl"
#include "attention.inl"
#include "logits.inl"
#include "matmul_avx2.inl"
#include "rows.inl"
}  // namespace

// Called only where the processor has these instructions; a static initializer would run everywhere.
void make_kernels_avx2(Kernels& k) {
  k.name = "avx2";
  k.portable_bf16 = true;
  fill_activations(k);
  fill_attention(k);
  fill_logits(k);
  fill_matmul(k);
  fill_rows(k);
}

}  // namespace sterna
