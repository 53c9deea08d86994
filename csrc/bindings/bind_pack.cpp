#include "bindings.h"

namespace sterna {

void bind_pack(nanobind::module_&) {}

}  // namespace sterna
