// The kernels for `portable`: shared sources over this instruction set's lanes, and its own matrix products.
#define STERNA_LANES_PORTABLE 1
#define STERNA_ISA portable
#define STERNA_ISA_NAME "portable"
#define STERNA_MATMUL "matmul_portable.inl"
#define STERNA_PORTABLE_BF16 true
#include "isa_body.inl"
