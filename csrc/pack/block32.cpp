// ggml's types with blocks of 32 weights and one scale each. Their nibbles lie as ours do: byte i holds weight i low and weight i + 16 high.
#include <limits>

#include "numbers.h"
#include "sources.h"

namespace sterna {

namespace {

constexpr int kHalf = kGroup / 2;
constexpr Format kInt4Zero{Quant::kInt4, false, false, 32};
constexpr Format kInt4Min{Quant::kInt4, true, false, 32};
constexpr Format kInt8Zero{Quant::kInt8, false, false, 32};
constexpr Format kInt8Min{Quant::kInt8, true, false, 32};
constexpr Format kInt8Float32{Quant::kInt8, false, true, 32};

void nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < kHalf; ++i) {
    codes[i] = from[i] & 15;
    codes[i + kHalf] = from[i] >> 4;
  }
}

// `bits`: the fifth bit of each weight, in order.
void add_fifth_bits(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < kGroup; ++i) codes[i] = uint8_t(codes[i] | (bits >> i & 1) << 4);
}

// Values by nibble, stored around the zero of int8.
void look_up(const uint8_t* from, const int8_t (&table)[16], uint8_t* codes) {
  nibbles(from, codes);
  for (int i = 0; i < kGroup; ++i) codes[i] = uint8_t(table[codes[i]] + 128);
}

float float16_at(const uint8_t* at) { return float16_to_float(load<uint16_t>(at)); }

void decode_q4_0(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // d | 16 bytes
  scales[0] = float16_at(block);
  nibbles(block + 2, codes);
}

void decode_q4_1(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {  // d | m | 16 bytes
  scales[0] = float16_at(block);
  minimums[0] = float16_at(block + 2);
  nibbles(block + 4, codes);
}

void decode_q5_0(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // d | fifth bits | 16 bytes
  scales[0] = float16_at(block);
  nibbles(block + 6, codes);
  add_fifth_bits(load<uint32_t>(block + 2), codes);
  for (int i = 0; i < kGroup; ++i) codes[i] = uint8_t(codes[i] + (128 - 16));
}

void decode_q5_1(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {  // d | m | fifth bits | 16 bytes
  scales[0] = float16_at(block);
  minimums[0] = float16_at(block + 2);
  nibbles(block + 8, codes);
  add_fifth_bits(load<uint32_t>(block + 4), codes);
}

void decode_q8_0(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // d | 32 bytes
  scales[0] = float16_at(block);
  for (int i = 0; i < kGroup; ++i) codes[i] = uint8_t(block[2 + i] ^ 0x80);
}

void decode_iq4_nl(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // d | 16 bytes
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  scales[0] = float16_at(block);
  look_up(block + 2, kValues, codes);
}

// e | 16 bytes: the OCP's MXFP4, a power of two and 4-bit floats, whose doubles are integers. 255 is its NaN; beyond 252 its weights are too large.
void decode_mxfp4(const uint8_t* block, uint8_t* codes, float* scales, float*) {
  static constexpr int8_t kDoubles[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint32_t exponent = block[0];
  if (exponent > 252) {
    scales[0] = std::numeric_limits<float>::quiet_NaN();
  } else {
    scales[0] = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);  // 2^(exponent - 128)
  }
  look_up(block + 1, kDoubles, codes);
}

}  // namespace

void add_block32_types(std::vector<SourceType>& types) {
  types.push_back({"Q4_0", 32, 18, kInt4Zero, decode_q4_0, nullptr});
  types.push_back({"Q4_1", 32, 20, kInt4Min, decode_q4_1, nullptr});
  types.push_back({"Q5_0", 32, 22, kInt8Zero, decode_q5_0, nullptr});
  types.push_back({"Q5_1", 32, 24, kInt8Min, decode_q5_1, nullptr});
  types.push_back({"Q8_0", 32, 34, kInt8Zero, decode_q8_0, nullptr});
  types.push_back({"IQ4_NL", 32, 18, kInt8Zero, decode_iq4_nl, nullptr});
  types.push_back({"MXFP4", 32, 17, kInt8Float32, decode_mxfp4, nullptr});
}

}  // namespace sterna
