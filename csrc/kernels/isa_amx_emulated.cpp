// The kernels of `amx` with tiles emulated on plain memory: for tests, where CMake option STERNA_EMULATE_AMX asks for it.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_EMULATED_TILES 1
#include "kernels.h"
#include "lanes.h"
#include "tiles.h"

namespace sterna {
namespace {
#include "activations.inl"
#include "attention.inl"
#include "logits.inl"
#include "matmul_amx.inl"
#include "noise.inl"
#include "rows.inl"
}  // namespace

// Called only where the processor has these instructions; a static initializer would run everywhere.
void make_kernels_amx_emulated(Kernels& k) {
  k.name = "amx-emulated";
  k.portable_bf16 = false;
  fill_activations(k);
  fill_attention(k);
  fill_logits(k);
  fill_matmul(k);
  fill_noise(k);
  fill_rows(k);
}

}  // namespace sterna
