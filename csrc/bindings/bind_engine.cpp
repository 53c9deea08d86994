#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "bindings.h"
#include "engine/engine.h"
#include "engine/rope.h"
#include "kernels/dispatch.h"
#include "model_reader.h"
#include "step_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sterna {
namespace {

using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

BoundMatrix make_matrix(int quant, bool has_min, bool float32_scales, int scale_group, int rows, int cols, Bytes data) {
  Matrix m;
  if (quant < 0 || quant > 2) throw std::invalid_argument("quant must be 0 (int4), 1 (int8) or 2 (bf16)");
  if (rows < 1 || cols < 1) throw std::invalid_argument("a matrix has rows and columns");
  if (scale_group != 32 && !(scale_group == 16 && quant == int(Quant::kInt8))) throw std::invalid_argument("scale_group must be 32, or 16 for int8");
  m.quant = Quant(quant);
  m.has_min = has_min && m.quant != Quant::kBf16;
  m.float32_scales = float32_scales;
  m.scale_group = uint8_t(scale_group);
  m.rows = rows;
  m.cols = cols;
  m.data = data.data();
  if (data.shape(0) != m.bytes()) throw std::invalid_argument("the matrix takes " + std::to_string(m.bytes()) + " bytes, got " + std::to_string(data.shape(0)));
  if (reinterpret_cast<uintptr_t>(m.data) % 64 != 0) throw std::invalid_argument("matrix data must be aligned to 64 bytes");
  return {m, nb::cast(data)};
}

// Vectors of the result become arrays that own them.
template <class T>
nb::object to_array(std::vector<T> values) {
  auto* held = new std::vector<T>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner));
}

// An engine and the Python objects that its weights lie in.
struct BoundEngine {
  nb::dict config;
  std::unique_ptr<Engine> engine;
};

BoundEngine* make_engine(nb::dict config, const std::vector<int64_t>& slots, int threads, const std::string& isa) {
  if (threads < 1) throw std::invalid_argument("threads must be positive");
  Model model = read_model(config);
  if (int(slots.size()) != model.kv_groups) throw std::invalid_argument("slots: one number per KV group");
  for (int64_t each : slots)
    if (each < kPage || each % kPage != 0) throw std::invalid_argument("slots must be multiples of " + std::to_string(kPage));
  auto bound = std::make_unique<BoundEngine>();
  bound->config = std::move(config);
  bound->engine = std::make_unique<Engine>(std::move(model), kernels_for(isa), slots, threads);
  return bound.release();
}

nb::tuple wait(BoundEngine& self, int64_t number) {
  StepResult result;
  {
    nb::gil_scoped_release release;
    result = self.engine->wait(number);
  }
  std::vector<int32_t> tokens;
  std::vector<uint8_t> is_nan;
  for (const SampledToken& each : result.rows) {
    tokens.push_back(each.token);
    is_nan.push_back(each.nan);
  }
  nb::object logprobs = nb::none();
  if (std::any_of(result.rows.begin(), result.rows.end(), [](const SampledToken& each) { return each.logprobs.has_value(); })) {
    nb::list rows;
    for (const SampledToken& each : result.rows) rows.append(to_python(each.logprobs));
    logprobs = std::move(rows);
  }
  return nb::make_tuple(to_array(std::move(tokens)), to_array(std::move(is_nan)), logprobs);
}

// How often a loop over `count` items has run each. Item `failing`, if there is one, throws as where memory runs out.
std::vector<int> run_each(ThreadPool& pool, int count, int failing) {
  std::vector<int> runs(size_t(std::max(0, count)));
  pool.each(count, [&](int64_t item, int) {
    if (item == failing) throw std::bad_alloc();
    ++runs[size_t(item)];
  });
  return runs;
}

nb::tuple turns(const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& angles) {
  std::vector<float> cosines, sines;
  for (size_t i = 0; i < angles.shape(0); ++i) {
    const Turn turn = turn_by(angles.data()[i]);
    cosines.push_back(turn.cosine);
    sines.push_back(turn.sine);
  }
  return nb::make_tuple(to_array(std::move(cosines)), to_array(std::move(sines)));
}

void fill_page(BoundEngine& self, int group, int64_t page, int byte) {
  KVPool& pool = self.engine->pool();
  const Model& model = self.engine->model();
  if (group < 0 || group >= model.kv_groups || page < 0 || page >= pool.pages(group)) throw std::invalid_argument("no such page");
  for (size_t i = 0; i < model.layers.size(); ++i)
    if (model.layers[i].attention.kv_group == group) std::memset(pool.page(int(i), page), byte, pool.page_bytes(int(i)));
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::cast<nb::module_>(m.attr("kernels")).def("turns", &turns, "angles"_a, "csrc/engine/rope.h: cosines and sines");
  nb::class_<ThreadPool>(m.attr("kernels"), "ThreadPool", "csrc/engine/threads.h")
      .def(nb::init<int>(), "threads"_a)
      .def("each", &run_each, "count"_a, "failing"_a = -1, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<BoundMatrix>(m, "Matrix", "Weights in the packed layout (csrc/kernels/matrix.h), over memory that `data` keeps alive.")
      .def(nb::new_(&make_matrix), "quant"_a, "has_min"_a, "float32_scales"_a, "scale_group"_a, "rows"_a, "cols"_a, "data"_a);
  nb::class_<BoundEngine>(m, "Engine", "csrc/engine/engine.h")
      .def(nb::new_(&make_engine), "config"_a, "slots"_a, "threads"_a, "isa"_a)
      .def(
          "bind",
          [](BoundEngine& self, int row, const SamplingOptions& options, Ints prompt, Ints output) {
            nb::gil_scoped_release release;
            self.engine->bind(row, options, prompt.data(), prompt.shape(0), output.data(), output.shape(0));
          },
          "row"_a, "options"_a, "prompt"_a, "output"_a)
      .def("release", [](BoundEngine& self, int row) { self.engine->release(row); }, "row"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_mask",
          [](BoundEngine& self, int row, std::optional<Words> words) {
            nb::gil_scoped_release release;
            self.engine->set_mask(row, words ? words->data() : nullptr, words ? words->shape(0) : 0);
          },
          "row"_a, "words"_a.none())
      .def(
          "submit",
          [](BoundEngine& self, int64_t number, Ints input_ids, std::optional<Ints> input_from, Ints row_splits, Ints prefix_lens, Ints seq_lens,
             Ints req_pool_idx, Bytes wants, std::vector<std::tuple<Table, Ints, Ints, Ints>> groups) {
            const StepArrays arrays{number, input_ids, input_from, row_splits, prefix_lens, seq_lens, req_pool_idx, wants, std::move(groups)};
            self.engine->submit(read_step(arrays, self.engine->model(), self.engine->pool()));
          },
          "number"_a, "input_ids"_a, "input_from"_a.none(), "row_splits"_a, "prefix_lens"_a, "seq_lens"_a, "req_pool_idx"_a, "wants"_a, "groups"_a)
      .def("wait", &wait, "number"_a, "(token per row or -1, whether its logits held NaN, logprobs per row or None where no token has any)")
      .def("stop", [](BoundEngine& self) { self.engine->stop(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("fill_page", &fill_page, "group"_a, "page"_a, "byte"_a, "For tests: set every byte of a page that nobody owns.")
      .def_prop_ro("queued", [](BoundEngine& self) { return self.engine->queued(); }, "Steps that have not begun")
      .def_prop_ro("kv_bytes", [](BoundEngine& self) { return self.engine->pool().bytes(); })
      .def_prop_ro("kv_lead_bytes", [](BoundEngine& self) { return self.engine->pool().lead_bytes(); }, "Of them, what is touched ahead of use")
      .def_prop_ro("kv_touched_bytes", [](BoundEngine& self) { return self.engine->pool().touched_bytes(); }, "Of them, what has been touched")
      .def_prop_ro("isa", [](BoundEngine& self) { return std::string(self.engine->kernels().name); });
}

}  // namespace sterna
