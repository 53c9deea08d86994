#include "matmul_portable.inl"
