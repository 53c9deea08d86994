#include "bindings.h"

namespace sterna {

void bind_attention(nanobind::module_&) {}

}  // namespace sterna
