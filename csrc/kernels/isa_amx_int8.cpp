// The kernels for `amx-int8`: those of `avx512`, and tiles for integers only, which give the same bits.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_TILES 1
#define STERNA_ISA amx_int8
#define STERNA_ISA_NAME "amx-int8"
#define STERNA_MATMUL "matmul_amx.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
