// The kernels for `avx512vnni`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX512 1
#define STERNA_ISA avx512vnni
#define STERNA_ISA_NAME "avx512vnni"
#define STERNA_MATMUL "matmul_avx512.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
