// The types that a model file stores matrices in, and what each becomes: ggml's block types (ggml-quants.h) and plain floats.
#pragma once

#include <string>
#include <vector>

#include "kernels/matrix.h"

namespace sterna {

// How a matrix is packed: the fields of `Matrix` that say so.
struct Format {
  Quant quant;
  bool has_min = false;
  bool float32_scales = false;
  int scale_group = kGroup;
};

struct SourceType {
  const char* name;  // ggml's and safetensors', which agree where both have a type
  int block_cols;
  int block_bytes;
  Format format;  // of a block type: the one that keeps its numbers; of floats: bfloat16, which rounds all but BF16

  // Of a block type: one block to its codes [block_cols], scales and (with has_min) minimums [block_cols / scale_group], such that the weights are
  // scale * code + minimum, or scale * (code - zero) without minimums. The one operation that may round is that sum, on reading.
  void (*decode)(const uint8_t* block, uint8_t* codes, float* scales, float* minimums);
  // Of floats: `count` of them.
  void (*widen)(const uint8_t* from, int count, float* values);

  bool is_floats() const { return widen != nullptr; }
};

const std::vector<SourceType>& source_types();

// Throws std::invalid_argument for a type that is not among them.
const SourceType& source_type(const std::string& name);

// Parts of the table, a file each.
void add_float_types(std::vector<SourceType>& types);
void add_block32_types(std::vector<SourceType>& types);
void add_block256_types(std::vector<SourceType>& types);

}  // namespace sterna
