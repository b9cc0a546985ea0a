#include "whole/weights.h"

#include <cmath>
#include <set>

#include "accuracy.h"
#include "core/check.h"
#include "core/formats.h"
#include "safetensors.h"
#include "winnow/error.h"

namespace winnow::cli::whole {

namespace {

using internal::core::to_bf16;

int64_t count_of(const Needed& n) {
  int64_t count = 1;
  for (const int64_t size : n.shape) count *= size;
  return count;
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void add_compressor(std::vector<Needed>& all, const Spec& s, const std::string& ours,
                    const std::string& theirs, int64_t d) {
  const int64_t width = s.values() * d;
  all.push_back({ours + ".kv_proj.weight", theirs + ".wkv.weight", {width, s.hidden}});
  if (s.gate)
    all.push_back({ours + ".gate_proj.weight", theirs + ".wgate.weight", {width, s.hidden}});
  if (s.bias)
    all.push_back({ours + ".position_bias", theirs + ".ape", {s.ratio, width}, Needed::kOffset});
  all.push_back({ours + ".kv_norm.weight", theirs + ".norm.weight", {d}, Needed::kNorm});
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "layer: --weights: " + what);
}

constexpr const char* kScales[] = {"weight_scale_inv", "scale"};

// "wq_a.weight" -> "wq_a.", which the names of block scales follow.
std::string base_of(const std::string& name) {
  return name.substr(0, name.size() - std::string("weight").size());
}

// Whatever a file may hold for a layer: experts beside it may have dtypes that winnow does not.
std::set<std::string> names_of(const std::vector<Needed>& needed, const std::string& prefix) {
  std::set<std::string> names;
  for (const Needed& n : needed)
    for (const std::string& name : {n.name, n.alias}) {
      if (name.empty()) continue;
      names.insert(prefix + name);
      if (n.role != Needed::kMatrix) continue;
      for (const char* ending : kScales) names.insert(prefix + base_of(name) + ending);
    }
  return names;
}

// A file's tensors by the names that a layer may have.
class Reader {
 public:
  Reader(const std::string& file, const std::string& prefix, const std::vector<Needed>& needed)
      : file_(tools::Safetensors::read(file,
                                       [names = names_of(needed, prefix)](const std::string& name) {
                                         return names.contains(name);
                                       })),
        prefix_(prefix) {}

  const Tensor& find(const Needed& n) {
    found_ = file_.has(prefix_ + n.name) ? prefix_ + n.name : prefix_ + n.alias;
    if (!file_.has(found_) || (n.alias.empty() && found_ != prefix_ + n.name)) {
      std::string text = prefix_ + n.name;
      if (!n.alias.empty()) text += " (or " + prefix_ + n.alias + ")";
      refuse(text + " is missing; expected " + text_of(n.shape));
    }
    const Tensor& t = file_.at(found_);
    const std::vector<int64_t> shape(t.shape.begin(), t.shape.begin() + t.rank);
    if (shape != n.shape)
      refuse(found_ + ": expected " + text_of(n.shape) + ", found " + text_of(shape));
    const bool scaled = t.dtype == DType::kE4m3 && n.role == Needed::kMatrix;
    if (t.dtype != DType::kBf16 && t.dtype != DType::kF32 && !scaled)
      refuse(found_ + ": expected bf16 or f32, found " + shape_of(t));
    if (!scaled && n.role == Needed::kMatrix && !scale_of(found_).empty())
      refuse(found_ + ": expected e4m3, since " + scale_of(found_) + " is beside it, found " +
             shape_of(t));
    return t;
  }
  // Scales of an e4m3 matrix that find() gave: of blocks whose size follows from their number.
  std::vector<double> scales(const Needed& n, int64_t& block) {
    const std::string name = scale_of(found_);
    if (name.empty())
      refuse(found_ + " is e4m3 and has neither weight_scale_inv nor scale beside it");
    const Tensor& t = file_.at(name);
    for (const int64_t size : {128, 32})
      if (t.rank == 2 && t.shape[0] == (n.shape[0] + size - 1) / size &&
          t.shape[1] == (n.shape[1] + size - 1) / size)
        block = size;
    if (block == 0)
      refuse(name + ": expected a scale for 128 x 128 or 32 x 32 values, found " + shape_of(t));
    if (t.dtype != DType::kU8 && t.dtype != DType::kF32 && t.dtype != DType::kBf16)
      refuse(name + ": expected f32, bf16 or ue8m0, found " + shape_of(t));
    std::vector<double> values(static_cast<size_t>(t.size()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = t.dtype == DType::kU8
                      ? internal::core::from_ue8m0(static_cast<const uint8_t*>(t.data)[i])
                      : tools::element(t, static_cast<int64_t>(i));
    return values;
  }

 private:
  // The block scales beside a matrix; "" where there are none.
  std::string scale_of(const std::string& name) const {
    for (const char* ending : kScales)
      if (file_.has(base_of(name) + ending)) return base_of(name) + ending;
    return "";
  }

  tools::Safetensors file_;
  std::string prefix_, found_;
};

}  // namespace

std::vector<Needed> needed_by(const Spec& s) {
  const int64_t n = s.index_heads;
  if (s.mla()) {
    std::vector<Needed> all = {
        {"q_a_proj.weight", "", {s.q_lora, s.hidden}},
        {"q_a_layernorm.weight", "", {s.q_lora}, Needed::kNorm},
        {"q_b_proj.weight", "", {s.heads * s.head(), s.q_lora}},
        {"kv_a_proj_with_mqa.weight", "", {576, s.hidden}},
        {"kv_a_layernorm.weight", "", {512}, Needed::kNorm},
        {"kv_b_proj.weight", "", {s.heads * (s.nope + s.value), 512}},
        {"o_proj.weight", "", {s.hidden, s.heads * s.value}},
    };
    if (!s.indexed()) return all;
    all.push_back({"indexer.wq_b.weight", "", {n * 128, s.q_lora}});
    all.push_back({"indexer.wk.weight", "", {128, s.hidden}});
    all.push_back({"indexer.k_norm.weight", "", {128}, Needed::kNorm});
    all.push_back({"indexer.k_norm.bias", "", {128}, Needed::kOffset});
    all.push_back({"indexer.weights_proj.weight", "", {n, s.hidden}});
    return all;
  }
  std::vector<Needed> all = {
      {"q_a_proj.weight", "wq_a.weight", {s.q_lora, s.hidden}},
      {"q_a_norm.weight", "q_norm.weight", {s.q_lora}, Needed::kNorm},
      {"q_b_proj.weight", "wq_b.weight", {s.heads * 512, s.q_lora}},
      {"kv_proj.weight", "wkv.weight", {512, s.hidden}},
      {"kv_norm.weight", "norm.weight", {512}, Needed::kNorm},  // as transformers 5.23 saves it
      {"sinks", "attn_sink", {s.heads}, Needed::kOffset},
      {"o_a_proj.weight", "wo_a.weight", {s.groups * s.rank, s.heads * 512 / s.groups}},
      {"o_b_proj.weight", "wo_b.weight", {s.hidden, s.groups * s.rank}},
  };
  if (s.compressed() && s.own_entries) add_compressor(all, s, "compressor", "compressor", 512);
  if (!s.indexed()) return all;
  const std::string indexer = "compressor.indexer";
  all.push_back({indexer + ".q_b_proj.weight", "indexer.wq_b.weight", {n * 128, s.q_lora}});
  all.push_back(
      {indexer + ".scorer.weights_proj.weight", "indexer.weights_proj.weight", {n, s.hidden}});
  if (!s.own_keys) return all;
  if (s.latent_keys) {
    all.push_back({"indexer.wk.weight", "", {128, 512}});
    all.push_back({"indexer.k_norm.weight", "", {128}, Needed::kNorm});
  } else {
    add_compressor(all, s, indexer, "indexer.compressor", 128);
  }
  return all;
}

Weights::Weights(const Spec& spec, const Queue& queue, uint64_t seed) {
  tools::Random random(seed);
  for (const Needed& n : needed_by(spec)) {
    shapes_[n.name] = n.shape;
    if (n.role == Needed::kMatrix) {
      Array<bf16>& to = matrices_[n.name] = Array<bf16>(queue, count_of(n));
      random.normals(to.span(), 1 / std::sqrt(static_cast<float>(n.shape[1])));
      to.to_device();
      continue;
    }
    Array<float>& to = vectors_[n.name] = Array<float>(queue, count_of(n));
    random.normals(to.span(), n.role == Needed::kNorm ? 0.2f : 1.0f);
    for (float& x : to.span()) x += n.role == Needed::kNorm ? 1.0f : 0.0f;
    to.to_device();
  }
}

Weights::Weights(const Spec& spec, const Queue& queue, const std::string& file,
                 const std::string& prefix) {
  const std::vector<Needed> needed = needed_by(spec);
  Reader reader(file, prefix, needed);
  for (const Needed& n : needed) {
    const Tensor& t = reader.find(n);
    shapes_[n.name] = n.shape;
    if (n.role != Needed::kMatrix) {
      Array<float>& to = vectors_[n.name] = Array<float>(queue, count_of(n));
      for (int64_t i = 0; i < to.size(); ++i)
        to.host()[i] = static_cast<float>(tools::element(t, i));
      to.to_device();
      continue;
    }
    Array<bf16>& to = matrices_[n.name] = Array<bf16>(queue, count_of(n));
    int64_t block = 0;
    std::vector<double> scales;
    if (t.dtype == DType::kE4m3) scales = reader.scales(n, block);
    const int64_t columns = n.shape[1], wide = block ? (columns + block - 1) / block : 0;
    for (int64_t i = 0; i < to.size(); ++i) {
      double value = tools::element(t, i);
      if (block)
        value *= scales[static_cast<size_t>(i / columns / block * wide + i % columns / block)];
      to.host()[i] = to_bf16(static_cast<float>(value));
    }
    to.to_device();
  }
}

Tensor Weights::matrix(const std::string& name) const {
  const std::vector<int64_t>& shape = shapes_.at(name);
  return matrices_.at(name).view({shape[0], shape[1]});
}
const bf16* Weights::matrix_on_host(const std::string& name) const {
  return matrices_.at(name).host();
}
Tensor Weights::vector(const std::string& name) const {
  const std::vector<int64_t>& shape = shapes_.at(name);
  const Array<float>& values = vectors_.at(name);
  return shape.size() == 1 ? values.view({shape[0]}) : values.view({shape[0], shape[1]});
}
const float* Weights::vector_on_host(const std::string& name) const {
  return vectors_.at(name).host();
}
double Weights::bytes() const {
  double all = 0;
  for (const auto& [name, values] : matrices_) all += values.bytes();
  for (const auto& [name, values] : vectors_) all += values.bytes();
  return all;
}

}  // namespace winnow::cli::whole
