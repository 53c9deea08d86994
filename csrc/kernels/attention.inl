static void fill_attention(Kernels&) {}
