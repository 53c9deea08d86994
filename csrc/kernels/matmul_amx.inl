#include "matmul_avx512.inl"
