// Floats to the formats that are not theirs. Deterministic: a group's result depends on its numbers alone.
#pragma once

#include <cstdint>

namespace sterna {

// 32 finite numbers to codes around 128 and a scale that is a float16: max|x| / 127, so that each number is off by half a scale at most.
// Returns false where the scale is too large for a float16.
bool quantize_int8(const float* values, uint8_t* codes, float* scale);

// 32 finite numbers to codes 0 .. 15, a scale and a minimum that are float16. Of several ranges (the numbers' own, and narrower ones that give up
// the extremes), each followed by a least-squares fit, the one with the smallest sum of squared errors is taken.
// Returns false where scale or minimum are too large for a float16.
bool quantize_int4(const float* values, uint8_t* codes, float* scale, float* minimum);

}  // namespace sterna
