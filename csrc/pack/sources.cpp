#include "sources.h"

#include <stdexcept>

#include "numbers.h"

namespace sterna {

namespace {

void widen_float64(const uint8_t* from, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] = float(load<double>(from + 8 * i));
}

void widen_float32(const uint8_t* from, int count, float* values) { std::memcpy(values, from, 4 * size_t(count)); }

void widen_float16(const uint8_t* from, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] = float16_to_float(load<uint16_t>(from + 2 * i));
}

void widen_bfloat16(const uint8_t* from, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] = bfloat16_to_float(load<uint16_t>(from + 2 * i));
}

}  // namespace

void add_float_types(std::vector<SourceType>& types) {
  const Format rounded{Quant::kBf16};
  types.push_back({"F64", 1, 8, rounded, nullptr, widen_float64});
  types.push_back({"F32", 1, 4, rounded, nullptr, widen_float32});
  types.push_back({"F16", 1, 2, rounded, nullptr, widen_float16});
  types.push_back({"BF16", 1, 2, rounded, nullptr, widen_bfloat16});
}

const std::vector<SourceType>& source_types() {
  static const std::vector<SourceType> made = [] {
    std::vector<SourceType> types;
    add_float_types(types);
    add_block32_types(types);
    add_block256_types(types);
    return types;
  }();
  return made;
}

const SourceType& source_type(const std::string& name) {
  for (const SourceType& type : source_types()) {
    if (name == type.name) return type;
  }
  throw std::invalid_argument("weights of type " + name + " can't be packed");
}

}  // namespace sterna
