// `_native.kernels`: attention, rows and logits of one instruction set, for tests and benchmarks. The engine calls the tables itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "kernels/dispatch.h"
#include "kernels/flush.h"

namespace nb = nanobind;

namespace sterna {
namespace {

template <typename T, int kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T, int kDims>
using InPlace = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<nb::numpy, T>;

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

template <typename T>
Output<T> make(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t each : shape) size *= each;
  T* data = new T[size]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Output<T>(data, shape, owner);
}

template <typename Array>
Output<float> copy_of(const Array& x) {
  Output<float> y = make<float>({x.size()});
  std::copy(x.data(), x.data() + x.size(), y.data());
  return y;
}

int length(size_t n) {
  require(n > 0 && n < size_t(1) << 31, "a row has between 1 and 2**31 - 1 elements");
  return int(n);
}

Output<float> rms_norm(const std::string& isa, Input<float, 1> x, Input<float, 1> weight, float eps) {
  require(weight.size() == x.size(), "x and weight differ in length");
  Output<float> y = make<float>({x.size()});
  FlushSubnormals flush;
  table(isa).rms_norm(x.data(), weight.data(), length(x.size()), eps, y.data());
  return y;
}

Output<float> add(const std::string& isa, Input<float, 1> x, Input<float, 1> y) {
  require(y.size() == x.size(), "x and y differ in length");
  Output<float> sum = copy_of(x);
  FlushSubnormals flush;
  table(isa).add(sum.data(), y.data(), length(x.size()));
  return sum;
}

Output<float> add_scaled(const std::string& isa, Input<float, 1> x, Input<float, 1> y, float factor) {
  require(y.size() == x.size(), "x and y differ in length");
  Output<float> sum = copy_of(x);
  FlushSubnormals flush;
  table(isa).add_scaled(sum.data(), y.data(), factor, length(x.size()));
  return sum;
}

Output<float> scale(const std::string& isa, Input<float, 1> x, float factor) {
  Output<float> y = copy_of(x);
  FlushSubnormals flush;
  table(isa).scale(y.data(), factor, length(x.size()));
  return y;
}

Output<float> softcap(const std::string& isa, Input<float, 1> x, float cap) {
  require(cap > 0, "cap must be positive");
  Output<float> y = copy_of(x);
  FlushSubnormals flush;
  table(isa).softcap(y.data(), cap, length(x.size()));
  return y;
}

Output<float> gated(const std::string& isa, Input<float, 1> gate, Input<float, 1> up, const std::string& activation) {
  require(gate.size() == up.size(), "gate and up differ in length");
  require(activation == "silu" || activation == "gelu" || activation == "gelu_tanh", "activation is silu, gelu or gelu_tanh");
  const Activation which = activation == "silu" ? Activation::kSilu : activation == "gelu" ? Activation::kGelu : Activation::kGeluTanh;
  Output<float> y = make<float>({gate.size()});
  FlushSubnormals flush;
  table(isa).gated(gate.data(), up.data(), length(gate.size()), which, y.data());
  return y;
}

Output<float> rope(const std::string& isa, Input<float, 2> x, Input<float, 1> cosines, Input<float, 1> sines) {
  require(cosines.size() == sines.size(), "cosines and sines differ in length");
  require(2 * cosines.size() <= x.shape(1), "more elements to rotate than a head has");
  Output<float> y = make<float>({x.shape(0), x.shape(1)});
  std::copy(x.data(), x.data() + x.size(), y.data());
  FlushSubnormals flush;
  table(isa).rope(y.data(), int(x.shape(0)), length(x.shape(1)), int(cosines.size()), cosines.data(), sines.data());
  return y;
}

nb::tuple maximum(const std::string& isa, Input<float, 1> x) {
  FlushSubnormals flush;
  const Maximum found = table(isa).maximum(x.data(), length(x.size()));
  return nb::make_tuple(found.value, found.index, found.has_nan);
}

double exp_sum(const std::string& isa, Input<float, 1> x, float largest) {
  FlushSubnormals flush;
  return table(isa).exp_sum(x.data(), length(x.size()), largest);
}

int head(size_t head_dim) {
  require(head_dim > 0 && head_dim <= 1024, "head_dim is between 1 and 1024");
  return int(head_dim);
}

Output<uint16_t> to_query(const std::string& isa, Input<float, 2> q) {
  const int head_dim = head(q.shape(1));
  Output<uint16_t> out = make<uint16_t>({q.shape(0), size_t(padded_dim(head_dim))});
  FlushSubnormals flush;
  for (size_t i = 0; i < q.shape(0); i++) table(isa).to_query(q.data() + i * head_dim, head_dim, out.data() + i * padded_dim(head_dim));
  return out;
}

void store_kv(const std::string& isa, Input<float, 1> k, Input<float, 1> v, int slot, InPlace<uint8_t, 1> page) {
  require(k.size() == v.size(), "k and v differ in length");
  const int head_dim = head(k.size());
  require(slot >= 0 && slot < kPage, "a page has slots 0 to 15");
  require(page.size() == page_head_bytes(head_dim), "a page of this head_dim has " + std::to_string(page_head_bytes(head_dim)) + " bytes");
  FlushSubnormals flush;
  table(isa).store_kv(k.data(), v.data(), head_dim, slot, page.data());
}

nb::tuple attend(const std::string& isa, Input<uint16_t, 2> q, Input<int32_t, 1> positions, Input<uint8_t, 2> pages, int first_key, int num_keys,
                 int head_dim, int window, float scale, float cap) {
  const size_t count = q.shape(0), dim = padded_dim(head(size_t(head_dim < 0 ? 0 : head_dim)));
  require(count > 0 && positions.size() == count, "one position for every query, and at least one");
  require(q.shape(1) == dim, "queries are padded to " + std::to_string(dim));
  require(pages.shape(1) == page_head_bytes(head_dim), "a page of this head_dim has " + std::to_string(page_head_bytes(head_dim)) + " bytes");
  require(first_key >= 0 && first_key % kSpan == 0, "first_key is a multiple of 256");
  require(num_keys >= 1 && num_keys <= kSpan, "a span has between 1 and 256 keys");
  require(pages.shape(0) == size_t(num_keys + kPage - 1) / kPage, "not the number of pages that num_keys takes");
  require(window >= 1, "window must be positive");
  require(cap >= 0, "softcap must not be negative");
  std::vector<const uint8_t*> pointers;
  for (size_t i = 0; i < pages.shape(0); i++) pointers.push_back(pages.data() + i * pages.shape(1));
  Output<float> m = make<float>({count}), l = make<float>({count}), o = make<float>({count, dim});
  const Queries queries{q.data(), positions.data(), int32_t(count), head_dim, window, scale, cap};
  {
    nb::gil_scoped_release release;
    FlushSubnormals flush;
    table(isa).attend(queries, Span{pointers.data(), first_key, num_keys}, Partial{m.data(), l.data(), o.data()});
  }
  return nb::make_tuple(m, l, o);
}

// Seconds that it takes to attend over all full spans of pages, one after another, the best of several rounds: for benchmarks.
double time_attend(const std::string& isa, Input<uint16_t, 2> q, Input<int32_t, 1> positions, Input<uint8_t, 2> pages, int head_dim, int rounds) {
  const size_t count = q.shape(0), dim = padded_dim(head(size_t(head_dim < 0 ? 0 : head_dim))), span_pages = kSpan / kPage;
  require(positions.size() == count && q.shape(1) == dim && pages.shape(1) == page_head_bytes(head_dim), "q, positions and pages disagree");
  require(pages.shape(0) % span_pages == 0 && rounds > 0, "pages of whole spans, and at least one round");
  std::vector<const uint8_t*> pointers;
  for (size_t i = 0; i < pages.shape(0); i++) pointers.push_back(pages.data() + i * pages.shape(1));
  std::vector<float> m(count), l(count), o(count * dim);
  const Queries queries{q.data(), positions.data(), int32_t(count), head_dim, kNoWindow, 0.125f, 0.0f};
  const Kernels& kernels = table(isa);
  nb::gil_scoped_release release;
  FlushSubnormals flush;
  double best = 1e30;
  for (int round = 0; round < rounds; round++) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t page = 0; page < pointers.size(); page += span_pages)
      kernels.attend(queries, Span{pointers.data() + page, int32_t(page * kPage), kSpan}, Partial{m.data(), l.data(), o.data()});
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

struct Shape {
  int count, head_dim;
};

Shape shape_of(const InPlace<float, 1>& m, const InPlace<float, 1>& l, const InPlace<float, 2>& o, int head_dim) {
  require(m.size() == l.size() && m.size() == o.shape(0), "m, l and o differ in length");
  require(o.shape(1) == size_t(padded_dim(head(size_t(head_dim < 0 ? 0 : head_dim)))), "o is not padded as head_dim asks");
  return {int(m.size()), head_dim};
}

void fold(const std::string& isa, InPlace<float, 1> m, InPlace<float, 1> l, InPlace<float, 2> o, InPlace<float, 1> next_m, InPlace<float, 1> next_l,
          InPlace<float, 2> next_o, int head_dim) {
  const Shape into = shape_of(m, l, o, head_dim), next = shape_of(next_m, next_l, next_o, head_dim);
  require(into.count == next.count, "the partials differ in length");
  FlushSubnormals flush;
  table(isa).fold(Partial{m.data(), l.data(), o.data()}, Partial{next_m.data(), next_l.data(), next_o.data()}, into.count, head_dim);
}

Output<float> finish(const std::string& isa, InPlace<float, 1> m, InPlace<float, 1> l, InPlace<float, 2> o, int head_dim) {
  const Shape from = shape_of(m, l, o, head_dim);
  Output<float> out = make<float>({size_t(from.count), size_t(head_dim)});
  FlushSubnormals flush;
  table(isa).finish(Partial{m.data(), l.data(), o.data()}, from.count, head_dim, out.data());
  return out;
}

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;
  nb::module_ kernels = m.def_submodule("kernels", "Kernels of one instruction set, for tests and benchmarks");
  kernels.def("rms_norm", &rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a);
  kernels.def("add", &add, "isa"_a, "x"_a, "y"_a);
  kernels.def("add_scaled", &add_scaled, "isa"_a, "x"_a, "y"_a, "factor"_a);
  kernels.def("scale", &scale, "isa"_a, "x"_a, "factor"_a);
  kernels.def("softcap", &softcap, "isa"_a, "x"_a, "cap"_a);
  kernels.def("gated", &gated, "isa"_a, "gate"_a, "up"_a, "activation"_a);
  kernels.def("rope", &rope, "isa"_a, "x"_a, "cosines"_a, "sines"_a, "x[heads][head_dim]; returns the rotated copy");
  kernels.def("maximum", &maximum, "isa"_a, "x"_a, "(value, index, has_nan)");
  kernels.def("exp_sum", &exp_sum, "isa"_a, "x"_a, "maximum"_a);
  kernels.def("to_query", &to_query, "isa"_a, "q"_a, "q[count][head_dim] to bfloat16 [count][padded_dim]");
  kernels.def("store_kv", &store_kv, "isa"_a, "k"_a, "v"_a, "slot"_a, "page"_a.noconvert(), "Writes into page");
  kernels.def("attend", &attend, "isa"_a, "q"_a, "positions"_a, "pages"_a, "first_key"_a, "num_keys"_a, "head_dim"_a, "window"_a = kNoWindow,
              "scale"_a = 1.0f, "softcap"_a = 0.0f, "pages[pages][page_head_bytes]; returns (m, l, o)");
  kernels.def("time_attend", &time_attend, "isa"_a, "q"_a, "positions"_a, "pages"_a, "head_dim"_a, "rounds"_a, "Seconds for all spans of pages");
  kernels.def("fold", &fold, "isa"_a, "m"_a.noconvert(), "l"_a.noconvert(), "o"_a.noconvert(), "next_m"_a, "next_l"_a, "next_o"_a, "head_dim"_a,
              "Merges the second partial into the first");
  kernels.def("finish", &finish, "isa"_a, "m"_a, "l"_a, "o"_a, "head_dim"_a);
}

}  // namespace sterna
