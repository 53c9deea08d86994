static void fill_rows(Kernels&) {}
