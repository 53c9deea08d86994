#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "engine/logprobs.h"

namespace sterna {

// (chosen, top ids, top, of ids), the fields of protocol/logprobs.py; None where nobody asked.
nanobind::object to_python(const std::optional<TokenLogprobs>& logprobs);

void bind_matmul(nanobind::module_& m);     // instruction sets, matrix products, activations
void bind_attention(nanobind::module_& m);  // attention, rows, logits
void bind_pack(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_engine(nanobind::module_& m);

}  // namespace sterna
