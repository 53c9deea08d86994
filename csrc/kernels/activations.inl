static void fill_activations(Kernels&) {}
