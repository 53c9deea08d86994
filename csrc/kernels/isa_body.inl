// All kernels of one instruction set. An isa_*.cpp says which, and includes this:
//   STERNA_LANES_*         its lanes (lanes.h); STERNA_HAS_DPBF16 where they have a product of bfloat16 pairs
//   STERNA_ISA             its name in identifiers: make_kernels_<STERNA_ISA>
//   STERNA_ISA_NAME        its name for people, which STERNA_ISA the environment variable takes
//   STERNA_MATMUL          the file of its matrix products
//   STERNA_TILES           where it has AMX's tiles (tiles.h); STERNA_EMULATED_TILES where they are emulated
//   STERNA_PORTABLE_BF16   Kernels::portable_bf16; with tiles, false has them take bfloat16 products too
#include "kernels.h"
#include "lanes.h"
#if defined(STERNA_TILES)
#include "tiles.h"
#endif

#define STERNA_JOIN(a, b) a##b
#define STERNA_MAKE(isa) STERNA_JOIN(make_kernels_, isa)

namespace sterna {
namespace {
#include "activations.inl"
#include "attention.inl"
#include "logits.inl"
#include STERNA_MATMUL
#include "noise.inl"
#include "rows.inl"
}  // namespace

// Called only where the processor has these instructions; a static initializer would run everywhere.
void STERNA_MAKE(STERNA_ISA)(Kernels& k) {
  k.name = STERNA_ISA_NAME;
  k.portable_bf16 = STERNA_PORTABLE_BF16;
  fill_activations(k);
  fill_attention(k);
  fill_logits(k);
  fill_matmul(k);
  fill_noise(k);
  fill_rows(k);
}

}  // namespace sterna
