// `_native.kernels`: matrix products and activations of one instruction set, for tests and benchmarks. The engine calls the tables itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "kernels/dispatch.h"
#include "kernels/flush.h"

namespace nb = nanobind;

namespace sterna {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <int kDims>
using Floats = nb::ndarray<const float, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& message) {
  if (!holds) throw nb::value_error(message.c_str());
}

const Kernels& table(const std::string& isa) {
  try {
    return kernels_for(isa);
  } catch (const std::invalid_argument& error) {
    throw nb::value_error(error.what());
  }
}

// Memory that starts a cache line and ends where it says, so that a sanitizer sees what reads behind it.
class Aligned {
 public:
  explicit Aligned(size_t bytes) : data_(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(64)))) { std::memset(data_, 0, bytes); }
  ~Aligned() { ::operator delete(data_, std::align_val_t(64)); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

template <typename T>
nb::ndarray<nb::numpy, T> array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t each : shape) size *= each;
  T* data = new T[size]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

using FormTuple = std::tuple<int, bool, bool, int>;

// A matrix of a form (quant, has_min, float32_scales, scale_group), without data.
Matrix shape_of(const FormTuple& form, int rows, int cols) {
  const auto [quant, has_min, float32_scales, scale_group] = form;
  require(quant >= 0 && quant <= 2, "quant is 0 (int4), 1 (int8) or 2 (bf16)");
  require(scale_group == 32 || (scale_group == 16 && quant == 1), "scale_group is 32, or for int8 also 16");
  require(quant != 2 || (!has_min && !float32_scales), "bf16 has neither minimums nor scales");
  require(rows > 0 && cols > 0 && rows <= 1 << 24 && cols <= 1 << 24, "rows and cols are between 1 and 2**24");
  Matrix w;
  w.quant = Quant(quant);
  w.has_min = has_min;
  w.float32_scales = float32_scales;
  w.scale_group = uint8_t(scale_group);
  w.rows = rows;
  w.cols = cols;
  return w;
}

Matrix matrix(const FormTuple& form, int rows, int cols, const Bytes& data, const Aligned& copy) {
  Matrix w = shape_of(form, rows, cols);
  std::memcpy(copy.data(), data.data(), data.size());
  w.data = copy.data();
  return w;
}

void require_bytes(const Matrix& w, const Bytes& data) {
  require(data.size() == w.bytes(), "a matrix of this form has " + std::to_string(w.bytes()) + " bytes, not " + std::to_string(data.size()));
}

// x as the matrix takes it.
struct Rows {
  Rows(const Kernels& kernels, const Matrix& w, const float* x, int rows)
      : stride(w.quant == Quant::kBf16 ? Activations::bf16_stride(w.cols) : Activations::int8_stride(w.cols)), memory(stride * size_t(rows)) {
    FlushSubnormals flush;
    for (size_t r = 0; r < size_t(rows); r++) {
      uint8_t* row = memory.data() + r * stride;
      const float* from = x + r * size_t(w.cols);
      if (w.quant == Quant::kBf16) {
        kernels.to_bf16(from, w.cols, row);
      } else {
        kernels.quantize(from, w.cols, row);
        kernels.refine(from, w.cols, row);
      }
    }
  }
  Activations view(const Matrix& w) const { return {memory.data(), stride, w.cols}; }

  size_t stride;
  Aligned memory;
};

// y[M][padded_rows]: computed in calls of rows_at_once rows and blocks_at_once blocks each (0: all at once), NaN before.
nb::ndarray<nb::numpy, float> matmul(const std::string& isa, const FormTuple& form, int rows, int cols, const Bytes& data, const Floats<2>& x,
                                     int rows_at_once, int blocks_at_once) {
  const Kernels& kernels = table(isa);
  require_bytes(shape_of(form, rows, cols), data);
  require(x.shape(1) == size_t(cols), "x has not as many columns as the matrix");
  require(x.shape(0) > 0 && x.shape(0) < 1 << 20, "x has between 1 and 2**20 rows");
  require(rows_at_once >= 0 && blocks_at_once >= 0, "as many at once as a positive number says, or 0 for all");
  const Aligned copy(data.size());
  const Matrix w = matrix(form, rows, cols, data, copy);
  const int num_rows = int(x.shape(0)), row_step = rows_at_once ? rows_at_once : num_rows, block_step = blocks_at_once ? blocks_at_once : w.blocks();
  auto y = array<float>({x.shape(0), size_t(w.padded_rows())});
  std::fill(y.data(), y.data() + y.size(), __builtin_nanf(""));
  nb::gil_scoped_release release;
  FlushSubnormals flush;
  const Rows quantized(kernels, w, x.data(), num_rows);
  Ahead ahead;
  for (int row = 0; row < num_rows; row += row_step) {
    for (int block = 0; block < w.blocks(); block += block_step) {
      kernels.matmul(w, quantized.view(w), row, std::min(row_step, num_rows - row), block, std::min(block_step, w.blocks() - block), y.data(),
                     size_t(w.padded_rows()), ahead);
    }
  }
  return y;
}

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

// Processor seconds of a product in the slowest of `threads` threads that cut it by blocks, the best of several rounds; `copies` matrices one after
// the other. Processor time, since other programs may share the machine.
double time_matmul(const std::string& isa, const FormTuple& form, int rows, int cols, int num_rows, int copies, int threads, int rounds) {
  const Kernels& kernels = table(isa);
  const Matrix shape = shape_of(form, rows, cols);
  require(num_rows > 0 && copies > 0 && threads > 0 && rounds > 0, "all counts are positive");
  nb::gil_scoped_release release;
  const Aligned data(shape.bytes() * size_t(copies));
  std::memset(data.data(), 0x34, shape.bytes() * size_t(copies));  // 0.26 as float16, and normal in the other formats
  std::vector<float> x(size_t(num_rows) * size_t(cols), 0.5f), y(size_t(num_rows) * size_t(shape.padded_rows()));
  const Rows quantized(kernels, shape, x.data(), num_rows);
  auto part = [&](int thread, double* seconds) {
    FlushSubnormals flush;
    const int first = int(int64_t(shape.blocks()) * thread / threads), end = int(int64_t(shape.blocks()) * (thread + 1) / threads);
    const double start = thread_seconds();
    Matrix w = shape;
    Ahead ahead;
    for (int i = 0; i < copies; i++) {
      w.data = data.data() + size_t(i) * shape.bytes();
      kernels.matmul(w, quantized.view(w), 0, num_rows, first, end - first, y.data(), size_t(shape.padded_rows()), ahead);
    }
    *seconds = thread_seconds() - start;
  };
  double best = 1e30;
  for (int round = 0; round < rounds; round++) {
    std::vector<double> seconds(size_t(threads), 0.0);
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(part, thread, &seconds[size_t(thread)]);
    part(0, seconds.data());
    for (std::thread& each : others) each.join();
    best = std::min(best, *std::max_element(seconds.begin(), seconds.end()));
  }
  return best / copies;
}

nb::tuple quantize(const std::string& isa, const Floats<1>& x) {
  const Kernels& kernels = table(isa);
  require(x.size() > 0 && x.size() <= 1 << 24, "x has between 1 and 2**24 elements");
  const int cols = int(x.size());
  const size_t groups = (x.size() + kGroup - 1) / kGroup;
  const Aligned row(Activations::int8_stride(cols));
  {
    FlushSubnormals flush;
    kernels.quantize(x.data(), cols, row.data());
    kernels.refine(x.data(), cols, row.data());
  }
  const ActivationGroup* all_groups = reinterpret_cast<const ActivationGroup*>(row.data());
  const int32_t* which = Activations::refined(row.data(), cols);
  const size_t num_refined = size_t(std::find(which, which + most_refined(int(groups)), kNoGroup) - which), count = groups + num_refined;
  auto refined = array<int32_t>({num_refined});
  std::copy(which, which + num_refined, refined.data());
  auto q = array<int8_t>({count, size_t(kGroup)});
  auto d = array<float>({count}), s = array<float>({count}), s16 = array<float>({count, 2});
  auto zero_int4 = array<int32_t>({count}), zero_int8 = array<int32_t>({count}), zero_int8_16 = array<int32_t>({count, 2});
  for (size_t g = 0; g < count; g++) {
    const ActivationGroup& group = all_groups[g];
    std::copy(group.q, group.q + kGroup, q.data() + g * kGroup);
    d.data()[g] = group.d;
    s.data()[g] = group.s;
    std::copy(group.s16, group.s16 + 2, s16.data() + 2 * g);
    zero_int4.data()[g] = group.zero_int4;
    zero_int8.data()[g] = group.zero_int8;
    std::copy(group.zero_int8_16, group.zero_int8_16 + 2, zero_int8_16.data() + 2 * g);
  }
  return nb::make_tuple(refined, q, d, s, s16, zero_int4, zero_int8, zero_int8_16);
}

nb::ndarray<nb::numpy, uint16_t> to_bf16(const std::string& isa, const Floats<1>& x) {
  const Kernels& kernels = table(isa);
  require(x.size() > 0 && x.size() <= 1 << 24, "x has between 1 and 2**24 elements");
  const size_t padded = (x.size() + kGroup - 1) / kGroup * kGroup;
  const Aligned row(Activations::bf16_stride(int(x.size())));
  FlushSubnormals flush;
  kernels.to_bf16(x.data(), int(x.size()), row.data());
  auto out = array<uint16_t>({padded});
  std::memcpy(out.data(), row.data(), padded * 2);
  return out;
}

nb::ndarray<nb::numpy, float> dequantize_row(const std::string& isa, const FormTuple& form, int rows, int cols, const Bytes& data, int row) {
  const Kernels& kernels = table(isa);
  require_bytes(shape_of(form, rows, cols), data);
  require(row >= 0 && row < rows, "the matrix has no such row");
  const Aligned copy(data.size());
  const Matrix w = matrix(form, rows, cols, data, copy);
  auto out = array<float>({size_t(w.padded_cols())});
  FlushSubnormals flush;
  kernels.dequantize_row(w, row, out.data());
  return out;
}

size_t matrix_bytes(const FormTuple& form, int rows, int cols) { return shape_of(form, rows, cols).bytes(); }

}  // namespace

void bind_matmul(nb::module_& m) {
  using namespace nb::literals;
  nb::module_ kernels = m.def_submodule("kernels", "Kernels of one instruction set, for tests and benchmarks");
  m.def("available_isas", &available_isas, "Instruction sets that build and processor have, best first");
  m.def("has_portable_bf16", [](const std::string& isa) { return table(isa).portable_bf16; }, "isa"_a,
        "Whether its bfloat16 products are summed in the order that all but AMX's tiles have (csrc/kernels/kernels.h)");
  kernels.def("matmul", &matmul, "isa"_a, "form"_a, "rows"_a, "cols"_a, "data"_a, "x"_a, "rows_at_once"_a = 0, "blocks_at_once"_a = 0,
              "x[M][cols] to y[M][padded_rows]; form = (quant, has_min, float32_scales, scale_group)");
  kernels.def("time_matmul", &time_matmul, "isa"_a, "form"_a, "rows"_a, "cols"_a, "num_rows"_a, "copies"_a, "threads"_a, "rounds"_a,
              "Processor seconds of a product in the slowest thread");
  kernels.def("quantize", &quantize, "isa"_a, "x"_a, "(refined[R], q[groups + R][32], d, s, s16, zero_int4, zero_int8, zero_int8_16): the groups, and then those that refine some");
  kernels.def("to_bf16", &to_bf16, "isa"_a, "x"_a, "Padded to whole groups of 32");
  kernels.def("dequantize_row", &dequantize_row, "isa"_a, "form"_a, "rows"_a, "cols"_a, "data"_a, "row"_a, "Padded to whole groups of 32");
  kernels.def("matrix_bytes", &matrix_bytes, "form"_a, "rows"_a, "cols"_a);
}

}  // namespace sterna
