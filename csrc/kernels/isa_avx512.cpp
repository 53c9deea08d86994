// The kernels for `avx512`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_ISA avx512
#define STERNA_ISA_NAME "avx512"
#define STERNA_MATMUL "matmul_avx512.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
