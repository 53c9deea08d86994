// The kernels for `avx2`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX2 1
#define STERNA_ISA avx2
#define STERNA_ISA_NAME "avx2"
#define STERNA_MATMUL "matmul_avx2.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
