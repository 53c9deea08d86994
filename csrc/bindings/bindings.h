#pragma once

#include <nanobind/nanobind.h>

namespace sterna {

void bind_matmul(nanobind::module_& m);     // instruction sets, matrix products, activations
void bind_attention(nanobind::module_& m);  // attention, rows, logits
void bind_pack(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_engine(nanobind::module_& m);

}  // namespace sterna
