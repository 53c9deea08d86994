#include "matmul_panels512.inl"

static void fill_matmul(Kernels& k) {
  k.matmul = matmul_by_form<Rows512>;
  k.rows_at_once = kPanelRows512;
}
