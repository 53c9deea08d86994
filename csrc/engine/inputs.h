// Activations on their way into matrix products: each row in the form, or the two forms, that the matrices ask for.
#pragma once

#include <cstring>
#include <initializer_list>

#include "buffer.h"
#include "kernels/kernels.h"

namespace sterna {

// Whether the int8 form refines groups that are far larger than the others (matrix.h). What comes from the stream between layers needs it: measured
// (docs/decisions/011), most of the engine's distance from float32 is from there. What attention and a gated MLP give has no such channels.
enum class Rounding { kPlain, kRefined };

class Inputs {
 public:
  // Room for `rows` rows of `cols` numbers, for these matrices (which all take `cols`).
  void reserve(int rows, int cols, Rounding rounding, std::initializer_list<const Matrix*> readers) {
    cols_ = cols;
    refine_ = rounding == Rounding::kRefined;
    int8_ = bf16_ = false;
    for (const Matrix* each : readers) (each->quant == Quant::kBf16 ? bf16_ : int8_) = true;
    if (int8_) int8_rows_.reserve(Activations::int8_stride(cols) * size_t(rows));
    if (bf16_) bf16_rows_.reserve(Activations::bf16_stride(cols) * size_t(rows));
  }

  void set(const Kernels& kernels, int row, const float* x) {
    set_columns(kernels, row, 0, x, cols_);
    if (int8_ && refine_) kernels.refine(x, cols_, int8_row(row));
  }

  // Columns `column` .. + count of a row that isn't refined; `column` is a multiple of kGroup, and so is count, or they are the last ones.
  void set_columns(const Kernels& kernels, int row, int column, const float* x, int count) {
    if (int8_) kernels.quantize(x, count, int8_row(row) + size_t(column / kGroup) * sizeof(ActivationGroup));
    if (int8_ && column == 0) *Activations::refined(int8_row(row), cols_) = kNoGroup;
    if (bf16_) kernels.to_bf16(x, count, bf16_rows_.get() + Activations::bf16_stride(cols_) * size_t(row) + size_t(column) * 2);
  }

  // Row `row` of these becomes row `from` of `other`, which holds all forms that this one is reserved for.
  void copy(int row, const Inputs& other, int from) {
    const size_t int8 = Activations::int8_stride(cols_), bf16 = Activations::bf16_stride(cols_);
    if (int8_) std::memcpy(int8_rows_.get() + int8 * size_t(row), other.int8_rows_.get() + int8 * size_t(from), int8);
    if (bf16_) std::memcpy(bf16_rows_.get() + bf16 * size_t(row), other.bf16_rows_.get() + bf16 * size_t(from), bf16);
  }

  Activations view(const Matrix& reader) const {
    if (reader.quant == Quant::kBf16) return {bf16_rows_.get(), Activations::bf16_stride(cols_), cols_};
    return {int8_rows_.get(), Activations::int8_stride(cols_), cols_};
  }

 private:
  uint8_t* int8_row(int row) { return int8_rows_.get() + Activations::int8_stride(cols_) * size_t(row); }

  int cols_ = 0;
  bool refine_ = false, int8_ = false, bf16_ = false;
  Buffer<uint8_t> int8_rows_, bf16_rows_;
};

}  // namespace sterna
