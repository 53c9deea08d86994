#include "model_reader.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace sterna {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// A dictionary and where it is in the model, for messages.
class Entries {
 public:
  Entries(nb::dict values, std::string where) : values_(std::move(values)), where_(std::move(where)) {}

  std::string name(const char* key) const { return where_ + key; }
  bool has(const char* key) const { return values_.contains(key) && !nb::object(values_[key]).is_none(); }
  nb::object at(const char* key) const {
    if (!values_.contains(key)) refuse(name(key) + " is missing");
    return values_[key];
  }
  template <class T>
  T get(const char* key) const {
    T value{};
    if (!nb::try_cast<T>(at(key), value)) refuse(name(key) + " is of the wrong type");
    return value;
  }
  int positive(const char* key) const {
    const int value = get<int>(key);
    if (value < 1) refuse(name(key) + " must be positive");
    return value;
  }
  // A vector of `size` floats, null where the entry is None.
  const float* vector(const char* key, int size) const {
    if (!has(key)) return nullptr;
    Floats values;
    // Without conversion: nobody would hold what one makes.
    if (!nb::try_cast(at(key), values, false)) refuse(name(key) + " is not a vector of float32");
    if (int64_t(values.shape(0)) != size) refuse(name(key) + " has " + std::to_string(values.shape(0)) + " numbers, expected " + std::to_string(size));
    return values.data();
  }
  Matrix matrix(const char* key, int rows, int cols) const {
    BoundMatrix* bound = nullptr;
    if (!nb::try_cast<BoundMatrix*>(at(key), bound) || bound == nullptr) refuse(name(key) + " is not a matrix");
    const Matrix& m = bound->matrix;
    if (m.rows != rows || m.cols != cols)
      refuse(name(key) + " is (" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "), expected (" + std::to_string(rows) + ", " + std::to_string(cols) + ")");
    return m;
  }
  Linear linear(const char* key, int rows, int cols) const { return {matrix(key, rows, cols), vector((std::string(key) + ".bias").c_str(), rows)}; }

 private:
  nb::dict values_;
  std::string where_;
};

Activation activation(const Entries& in) {
  const auto name = in.get<std::string>("activation");
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  refuse(in.name("activation") + ": " + name + " is unknown");
}

GatedMLP read_mlp(const Entries& in, int hidden) {
  GatedMLP mlp;
  mlp.intermediate = in.positive("intermediate");
  mlp.activation = activation(in);
  mlp.gate = in.linear("gate", mlp.intermediate, hidden);
  mlp.up = in.linear("up", mlp.intermediate, hidden);
  mlp.down = in.linear("down", hidden, mlp.intermediate);
  return mlp;
}

Mixture read_mixture(const Entries& in, int hidden) {
  Mixture mixture;
  mixture.top_k = in.positive("top_k");
  mixture.normalize = in.get<bool>("normalize");
  const nb::list experts = in.get<nb::list>("experts");
  for (size_t e = 0; e < experts.size(); ++e)
    mixture.experts.push_back(read_mlp(Entries(nb::cast<nb::dict>(experts[e]), in.name("experts.") + std::to_string(e) + "."), hidden));
  if (mixture.top_k > int(mixture.experts.size())) refuse(in.name("top_k") + " is more than there are experts");
  for (const GatedMLP& each : mixture.experts)
    if (each.intermediate != mixture.experts[0].intermediate || each.activation != mixture.experts[0].activation ||
        each.gate.weight.quant != mixture.experts[0].gate.weight.quant || each.up.weight.quant != mixture.experts[0].up.weight.quant ||
        each.down.weight.quant != mixture.experts[0].down.weight.quant)
      refuse(in.name("experts") + " differ in shape or format");
  mixture.router = in.matrix("router", int(mixture.experts.size()), hidden);
  return mixture;
}

Attention read_attention(const Entries& in, int hidden, const Model& model) {
  Attention a;
  a.heads = in.positive("heads");
  a.kv_heads = in.positive("kv_heads");
  a.head_dim = in.positive("head_dim");
  if (a.heads % a.kv_heads != 0) refuse(in.name("kv_heads") + " does not divide heads");
  a.scale = in.get<float>("scale");
  a.softcap = in.has("softcap") ? in.get<float>("softcap") : 0.0f;
  a.window = in.has("window") ? in.positive("window") : kNoWindow;
  a.rope = in.has("rope") ? in.get<int>("rope") : -1;
  if (a.rope >= int(model.ropes.size()) || (a.rope >= 0 && 2 * int(model.ropes[a.rope].frequencies.size()) > a.head_dim)) refuse(in.name("rope") + " does not fit");
  a.kv_group = in.get<int>("kv_group");
  if (a.kv_group < 0 || a.kv_group >= model.kv_groups) refuse(in.name("kv_group") + " is not a group");
  a.q = in.linear("q", a.heads * a.head_dim, hidden);
  a.k = in.linear("k", a.kv_heads * a.head_dim, hidden);
  a.v = in.linear("v", a.kv_heads * a.head_dim, hidden);
  a.o = in.linear("o", hidden, a.heads * a.head_dim);
  if (!in.has("qk_norm")) return a;
  const bool per_head = in.get<std::string>("qk_norm") == "head";
  a.qk_norm = per_head ? QkNorm::kHead : QkNorm::kProjection;
  a.q_norm = in.vector("q_norm", per_head ? a.head_dim : a.heads * a.head_dim);
  a.k_norm = in.vector("k_norm", per_head ? a.head_dim : a.kv_heads * a.head_dim);
  if (a.q_norm == nullptr || a.k_norm == nullptr) refuse(in.name("q_norm") + " or k_norm is missing");
  return a;
}

Layer read_layer(const Entries& in, const nb::dict& values, const std::string& where, const Model& model) {
  const int hidden = model.hidden_size;
  Layer layer;
  layer.norm_eps = in.get<float>("norm_eps");
  layer.residual_scale = in.get<float>("residual_scale");
  layer.attn_norm = in.vector("attn_norm", hidden);
  layer.attn_post_norm = in.vector("attn_post_norm", hidden);
  layer.mlp_norm = in.vector("mlp_norm", hidden);
  layer.mlp_post_norm = in.vector("mlp_post_norm", hidden);
  layer.attention = read_attention(Entries(nb::cast<nb::dict>(values["attn"]), where + "attn."), hidden, model);
  const Entries mlp(nb::cast<nb::dict>(values["mlp"]), where + "mlp.");
  if (mlp.has("experts"))
    layer.mixture = read_mixture(mlp, hidden);
  else
    layer.mlp = read_mlp(mlp, hidden);
  return layer;
}

}  // namespace

Model read_model(const nb::dict& config) {
  const Entries in(config, "");
  Model model;
  model.vocab_size = in.positive("vocab_size");
  model.hidden_size = in.positive("hidden_size");
  model.kv_groups = in.positive("kv_groups");
  model.embed_scale = in.get<float>("embed_scale");
  model.logit_scale = in.get<float>("logit_scale");
  model.logit_softcap = in.has("logit_softcap") ? in.get<float>("logit_softcap") : 0.0f;
  model.final_norm_eps = in.get<float>("final_norm_eps");
  model.embed = in.matrix("embed", model.vocab_size, model.hidden_size);
  model.head = in.linear("head", model.vocab_size, model.hidden_size);
  model.final_norm = in.vector("final_norm", model.hidden_size);
  if (model.final_norm == nullptr) refuse("final_norm is missing");
  for (nb::handle each : in.get<nb::list>("ropes")) {
    const auto pair = nb::cast<nb::tuple>(each);
    const auto frequencies = nb::cast<Floats>(pair[0]);
    model.ropes.push_back({{frequencies.data(), frequencies.data() + frequencies.shape(0)}, nb::cast<float>(pair[1])});
  }
  const nb::list layers = in.get<nb::list>("layers");
  if (layers.size() == 0) refuse("layers: there must be one");
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto values = nb::cast<nb::dict>(layers[i]);
    const std::string where = "layers." + std::to_string(i) + ".";
    model.layers.push_back(read_layer(Entries(values, where), values, where, model));
  }
  for (int g = 0; g < model.kv_groups; ++g)
    if (std::none_of(model.layers.begin(), model.layers.end(), [g](const Layer& layer) { return layer.attention.kv_group == g; }))
      refuse("kv_groups: no layer is of group " + std::to_string(g));
  return model;
}

}  // namespace sterna
