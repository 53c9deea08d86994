// ggml's types with blocks of 256 weights, whose scales are themselves quantized. A scale times its own scale has 19 significant bits at most, so
// that the product kept in float32 is exact.
#include "numbers.h"
#include "sources.h"

namespace sterna {

namespace {

constexpr int kBlock = 256;
constexpr Format kInt4Min{Quant::kInt4, true, true, 32};
constexpr Format kInt8Min{Quant::kInt8, true, true, 32};
constexpr Format kInt8Zero{Quant::kInt8, false, true, 32};
constexpr Format kInt8Min16{Quant::kInt8, true, true, 16};
constexpr Format kInt8Zero16{Quant::kInt8, false, true, 16};

float float16_at(const uint8_t* at) { return float16_to_float(load<uint16_t>(at)); }

// 64 bytes of four weights each: byte k of a run of 32 holds weights k, 32 + k, 64 + k, 96 + k of 128.
void pairs_of_bits(const uint8_t* from, uint8_t* codes) {
  for (int run = 0; run < 2; ++run) {
    for (int part = 0; part < 4; ++part) {
      for (int k = 0; k < 32; ++k) codes[128 * run + 32 * part + k] = from[32 * run + k] >> 2 * part & 3;
    }
  }
}

// 128 bytes of two weights each: byte k of a run of `kRun` holds weights k low and kRun + k high.
template <int kRun>
void nibbles(const uint8_t* from, uint8_t* codes) {
  for (int run = 0; run < 128 / kRun; ++run, from += kRun, codes += 2 * kRun) {
    for (int k = 0; k < kRun; ++k) {
      codes[k] = from[k] & 15;
      codes[kRun + k] = from[k] >> 4;
    }
  }
}

void decode_q2_k(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {  // 16 scale, minimum | 64 bytes | d | dmin
  const float d = float16_at(block + 80), dmin = float16_at(block + 82);
  pairs_of_bits(block + 16, codes);
  for (int g = 0; g < 16; ++g) {
    scales[g] = d * float(block[g] & 15);
    minimums[g] = -(dmin * float(block[g] >> 4));
  }
}

void decode_q3_k(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // 32 bytes of high bits | 64 bytes | 12 of scales | d
  const uint8_t* low = block + 96;  // 8 bytes of low nibbles, 4 of high pairs
  const float d = float16_at(block + 108);
  pairs_of_bits(block + 32, codes);
  for (int part = 0; part < 8; ++part) {  // a high bit that is set takes 4 less away
    for (int k = 0; k < 32; ++k) codes[32 * part + k] = uint8_t(codes[32 * part + k] + 124 + (block[k] >> part & 1) * 4);
  }
  for (int g = 0; g < 16; ++g) {
    const int scale = (low[g % 8] >> g / 8 * 4 & 15) | (low[8 + g % 4] >> g / 4 * 2 & 3) << 4;
    scales[g] = d * float(scale - 32);
  }
}

// Q4_K's and Q5_K's 12 bytes: 8 scales and 8 minimums of 6 bits.
void scales_of_k(const uint8_t* packed, float d, float dmin, float* scales, float* minimums) {
  for (int g = 0; g < 8; ++g) {
    int scale, minimum;
    if (g < 4) {
      scale = packed[g] & 63;
      minimum = packed[g + 4] & 63;
    } else {
      scale = (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
      minimum = packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    }
    scales[g] = d * float(scale);
    minimums[g] = -(dmin * float(minimum));
  }
}

void decode_q4_k(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {  // d | dmin | 12 of scales | 128 bytes
  scales_of_k(block + 4, float16_at(block), float16_at(block + 2), scales, minimums);
  nibbles<32>(block + 16, codes);
}

void decode_q5_k(const uint8_t* block, uint8_t* codes, float* scales, float* minimums) {  // d | dmin | 12 of scales | 32 of fifth bits | 128
  scales_of_k(block + 4, float16_at(block), float16_at(block + 2), scales, minimums);
  nibbles<32>(block + 48, codes);
  for (int part = 0; part < 8; ++part) {
    for (int k = 0; k < 32; ++k) codes[32 * part + k] = uint8_t(codes[32 * part + k] | (block[16 + k] >> part & 1) << 4);
  }
}

void decode_q6_k(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // 128 bytes | 64 of high bits | 16 scales | d
  const float d = float16_at(block + 208);
  uint8_t high[kBlock];
  nibbles<64>(block, codes);
  pairs_of_bits(block + 128, high);
  for (int i = 0; i < kBlock; ++i) codes[i] = uint8_t((codes[i] | high[i] << 4) + (128 - 32));
  for (int g = 0; g < 16; ++g) scales[g] = d * float(int8_t(block[192 + g]));
}

void decode_iq4_xs(const uint8_t* block, uint8_t* codes, float* scales, float*) {  // d | high pairs of scales | 4 of low nibbles | 128 bytes
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const float d = float16_at(block);
  const int high = load<uint16_t>(block + 2);
  nibbles<16>(block + 8, codes);
  for (int i = 0; i < kBlock; ++i) codes[i] = uint8_t(kValues[codes[i]] + 128);
  for (int g = 0; g < 8; ++g) {
    const int scale = (block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
    scales[g] = d * float(scale - 32);
  }
}

}  // namespace

void add_block256_types(std::vector<SourceType>& types) {
  types.push_back({"Q2_K", 256, 84, kInt8Min16, decode_q2_k, nullptr});
  types.push_back({"Q3_K", 256, 110, kInt8Zero16, decode_q3_k, nullptr});
  types.push_back({"Q4_K", 256, 144, kInt4Min, decode_q4_k, nullptr});
  types.push_back({"Q5_K", 256, 176, kInt8Min, decode_q5_k, nullptr});
  types.push_back({"Q6_K", 256, 210, kInt8Zero16, decode_q6_k, nullptr});
  types.push_back({"IQ4_XS", 256, 136, kInt8Zero, decode_iq4_xs, nullptr});
}

}  // namespace sterna
