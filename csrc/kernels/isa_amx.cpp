// The kernels for `amx`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_TILES 1
#define STERNA_ISA amx
#define STERNA_ISA_NAME "amx"
#define STERNA_MATMUL "matmul_amx.inl"
#define STERNA_PORTABLE_BF16 false
#include "isa_body.inl"
