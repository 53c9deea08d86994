// The sampler: `SamplingOptions` for the executor; `Sampler` and `kernels.filter_floor` for tests and benchmarks.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "engine/filters.h"
#include "engine/sampler.h"
#include "kernels/dispatch.h"
#include "kernels/flush.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sterna {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A sampler with a scratch and checks of its own, where the engine has made them.
class BoundSampler {
 public:
  BoundSampler(int vocab_size, const std::string& isa) : vocab_size_(vocab_size), sampler_(vocab_size, kernels_for(isa)) {}

  void bind(int row, const SamplingOptions& options, const Ids& prompt, const Ids& output) {
    sampler_.bind(row, options, prompt.data(), prompt.size(), output.data(), output.size());
  }
  void release(int row) { sampler_.release(row); }
  bool is_bound(int row) const { return sampler_.is_bound(row); }
  void set_mask(int row, const std::optional<Words>& mask) {
    sampler_.set_mask(row, mask ? mask->data() : nullptr, mask ? mask->size() : 0);
  }
  SampledToken sample(int row, const Row& logits) {
    if (!sampler_.is_bound(row)) throw std::invalid_argument("row " + std::to_string(row) + " isn't bound");
    if (logits.size() != size_t(vocab_size_)) throw std::invalid_argument("logits of another vocabulary");
    FlushSubnormals flush;
    return sampler_.sample(row, logits.data(), scratch_);
  }

 private:
  int vocab_size_;
  Sampler sampler_;
  SamplerScratch scratch_;
};

// Where the filters cut z, for finite logits.
float floor_of(const std::string& isa, const SamplingOptions& options, const Row& logits) {
  if (logits.size() == 0) throw std::invalid_argument("no logits");
  const Kernels& kernels = kernels_for(isa);
  const int n = int(logits.size());
  FlushSubnormals flush;
  SamplerScratch scratch;
  scratch.reserve(n, 0);
  return filter_floor(kernels, options, Logits{logits.data(), n, kernels.maximum(logits.data(), n).value, options.temperature}, scratch);
}

}  // namespace

nb::object to_python(const std::optional<TokenLogprobs>& logprobs) {
  if (!logprobs) return nb::none();
  const auto packed = [](const auto& values) { return nb::bytes(values.data(), values.size() * sizeof(values[0])); };
  return nb::make_tuple(logprobs->chosen, packed(logprobs->ids), packed(logprobs->values), packed(logprobs->of_ids));
}

void bind_sampler(nb::module_& m) {
  nb::class_<SamplingOptions>(m, "SamplingOptions")
      .def(nb::init<>())
      .def_rw("temperature", &SamplingOptions::temperature)
      .def_rw("top_k", &SamplingOptions::top_k)
      .def_rw("top_p", &SamplingOptions::top_p)
      .def_rw("min_p", &SamplingOptions::min_p)
      .def_rw("repetition", &SamplingOptions::repetition)
      .def_rw("presence", &SamplingOptions::presence)
      .def_rw("frequency", &SamplingOptions::frequency)
      .def_rw("seed", &SamplingOptions::seed)
      .def_rw("min_new_tokens", &SamplingOptions::min_new_tokens)
      .def_rw("end_ids", &SamplingOptions::end_ids)
      .def_rw("bias_ids", &SamplingOptions::bias_ids)
      .def_rw("bias_values", &SamplingOptions::bias_values)
      .def_rw("top_logprobs", &SamplingOptions::top_logprobs)
      .def_rw("logprob_ids", &SamplingOptions::logprob_ids);
  nb::class_<SampledToken>(m, "SampledToken")
      .def_ro("token", &SampledToken::token)
      .def_ro("nan", &SampledToken::nan)
      .def_prop_ro("logprobs", [](const SampledToken& sampled) { return to_python(sampled.logprobs); }, "(chosen, top ids, top, of ids), the last three as bytes, or None");
  nb::class_<BoundSampler>(m, "Sampler")
      .def(nb::init<int, const std::string&>(), "vocab_size"_a, "isa"_a)
      .def("bind", &BoundSampler::bind, "row"_a, "options"_a, "prompt"_a, "output"_a)
      .def("release", &BoundSampler::release, "row"_a)
      .def("is_bound", &BoundSampler::is_bound, "row"_a)
      .def("set_mask", &BoundSampler::set_mask, "row"_a, "mask"_a.none())
      .def("sample", &BoundSampler::sample, "row"_a, "logits"_a.noconvert());
  nb::borrow<nb::module_>(m.attr("kernels")).def("filter_floor", &floor_of, "isa"_a, "options"_a, "logits"_a.noconvert());
}

}  // namespace sterna
