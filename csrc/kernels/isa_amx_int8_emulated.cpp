// The kernels of `amx-int8` with tiles emulated on plain memory: for tests, where CMake option STERNA_EMULATE_AMX asks for it.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_TILES 1
#define STERNA_EMULATED_TILES 1
#define STERNA_ISA amx_int8_emulated
#define STERNA_ISA_NAME "amx-int8-emulated"
#define STERNA_MATMUL "matmul_amx.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
