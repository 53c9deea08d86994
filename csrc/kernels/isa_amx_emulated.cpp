// The kernels of `amx` with tiles emulated on plain memory: for tests, where CMake option STERNA_EMULATE_AMX asks for it.
#define STERNA_LANES_AVX512 1
#define STERNA_HAS_DPBF16 1
#define STERNA_TILES 1
#define STERNA_EMULATED_TILES 1
#define STERNA_ISA amx_emulated
#define STERNA_ISA_NAME "amx-emulated"
#define STERNA_MATMUL "matmul_amx.inl"
#define STERNA_PORTABLE_BF16 false
#include "isa_body.inl"
