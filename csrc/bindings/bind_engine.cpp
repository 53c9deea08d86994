#include "bindings.h"

namespace sterna {

void bind_engine(nanobind::module_&) {}

}  // namespace sterna
