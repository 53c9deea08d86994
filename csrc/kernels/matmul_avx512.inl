static void fill_matmul(Kernels&) {}
