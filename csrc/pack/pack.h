// From a matrix as a model file stores it to the layout of kernels/matrix.h.
#pragma once

#include <optional>

#include "sources.h"

namespace sterna {

// Why a row can't be packed.
struct PackFault {
  int64_t row;  // counted from the first one given
  const char* what;
};

// Whether a source may be packed so: a block type in its own format only; floats as bf16, int8 (groups of 32, float16 scales) or int4 (groups of
// 32, float16 scales and minimums).
bool can_pack(const SourceType& source, const Format& format);

// `Matrix` without data: sizes. Throws std::invalid_argument for sizes that are not positive or a format that the layout doesn't have.
Matrix layout_of(const Format& format, int64_t rows, int64_t cols);

// Pack `layout.rows` rows, stored one after another, into whole blocks: `out` takes layout.bytes(), which it need not be aligned for, and is
// written throughout unless there is a fault. `layout` is a matrix, or the part of one that begins at a block's first row. Work is split among up
// to `threads`; neither the bytes nor the fault (the first by row) depend on how many.
// Faults: a weight, scale or minimum that is NaN or infinite, and floats too large for the format.
// The caller has checked that `can_pack`, that layout.cols is whole source blocks, and the sizes of `rows` and `out`.
std::optional<PackFault> pack_rows(const SourceType& source, const Matrix& layout, const uint8_t* rows, uint8_t* out, int threads);

}  // namespace sterna
