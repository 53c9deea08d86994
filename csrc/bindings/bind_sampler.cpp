#include "bindings.h"

namespace sterna {

void bind_sampler(nanobind::module_&) {}

}  // namespace sterna
