#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>

#include "bindings.h"
#include "pack/checksum.h"
#include "pack/pack.h"

namespace nb = nanobind;

namespace sterna {

namespace {

using FormatTuple = std::tuple<int, bool, bool, int>;  // quant, has_min, float32_scales, scale_group
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Format format_from(const FormatTuple& fields) {
  const auto [quant, has_min, float32_scales, scale_group] = fields;
  if (quant < 0 || quant > int(Quant::kBf16)) throw std::invalid_argument("no such quantization");
  return {Quant(quant), has_min, float32_scales, scale_group};
}

nb::dict pack_sources() {
  nb::dict sources;
  for (const SourceType& type : source_types()) {
    const Format& format = type.format;
    sources[type.name] = nb::make_tuple(
        type.block_cols, type.block_bytes, type.is_floats(),
        nb::make_tuple(int(format.quant), format.has_min, format.float32_scales, format.scale_group));
  }
  return sources;
}

size_t matrix_bytes(const FormatTuple& format, int64_t rows, int64_t cols) { return layout_of(format_from(format), rows, cols).bytes(); }

std::optional<std::pair<int64_t, std::string>> pack(const std::string& source_name, const FormatTuple& fields, int64_t cols, const Rows& rows,
                                                    const Bytes& out, int threads) {
  const SourceType& source = source_type(source_name);
  const Format format = format_from(fields);
  if (!can_pack(source, format)) throw std::invalid_argument("weights of type " + source_name + " can't be packed in this format");
  const Matrix layout = layout_of(format, int64_t(rows.shape(0)), cols);
  if (cols % source.block_cols != 0 || rows.shape(1) != size_t(cols / source.block_cols) * source.block_bytes) {
    throw std::invalid_argument("rows of " + std::to_string(rows.shape(1)) + " bytes don't hold " + std::to_string(cols) + " weights of type " +
                                source_name);
  }
  if (out.shape(0) != layout.bytes()) {
    throw std::invalid_argument("the packed rows take " + std::to_string(layout.bytes()) + " bytes, not " + std::to_string(out.shape(0)));
  }
  nb::gil_scoped_release unlocked;
  const auto fault = pack_rows(source, layout, rows.data(), out.data(), threads);
  if (!fault) return std::nullopt;
  return std::pair{fault->row, std::string(fault->what)};
}

uint64_t checksum_of(const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data, int threads) {
  nb::gil_scoped_release unlocked;
  return checksum(data.data(), data.shape(0), threads);
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("pack_sources", pack_sources,
        "Type -> (block columns, block bytes, whether floats, (quant, has_min, float32_scales, scale_group) that it is packed in).");
  m.def("matrix_bytes", matrix_bytes, nb::arg("format"), nb::arg("rows"), nb::arg("cols"), "Bytes that a packed matrix takes.");
  m.def("pack_rows", pack, nb::arg("source"), nb::arg("format"), nb::arg("cols"), nb::arg("rows"), nb::arg("out"), nb::arg("threads"),
        "Pack stored rows (n, row bytes), which begin at a block, into `out`: None, or the first row at fault and why.");
  m.def("checksum", checksum_of, nb::arg("data"), nb::arg("threads"), "csrc/pack/checksum.h");
}

}  // namespace sterna
