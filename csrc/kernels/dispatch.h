// Which instruction sets this build has, which of them this processor has, and the table of the best.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace sterna {

// Best first, of those that both the build and the processor have: amx, amx-int8, avx512 (VNNI and BF16), avx512vnni (without BF16), avx2,
// portable; and then amx-emulated and amx-int8-emulated, in builds for tests.
std::vector<std::string> available_isas();

// The table of an instruction set. Throws std::invalid_argument, naming those available, for one that is not.
const Kernels& kernels_for(const std::string& isa);

}  // namespace sterna
