#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kernels/dispatch.h"

namespace sterna {

void bind_matmul(nanobind::module_& m) { m.def("available_isas", &available_isas); }

}  // namespace sterna
