// The extension module. Each part binds itself; `kernels` is for tests and benchmarks only.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
  sterna::bind_matmul(m);
  sterna::bind_attention(m);
  sterna::bind_pack(m);
  sterna::bind_sampler(m);
  sterna::bind_engine(m);
}
