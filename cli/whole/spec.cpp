#include "whole/spec.h"

#include <algorithm>
#include <cmath>

#include "winnow/error.h"

namespace winnow::cli::whole {

namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

bool is_v41(const std::string& model) { return model == "v4.1-flash"; }
bool is_mla(const std::string& model) { return model == "v3.2" || model == "glm-5"; }

Spec mla(const std::string& model) {
  Spec s{.model = model, .topk = 2048, .index_slice = RopeSlice::kFirst};
  const bool glm = model == "glm-5";
  s.hidden = glm ? 6144 : 7168;
  s.heads = glm ? 64 : 128;
  s.q_lora = glm ? 2048 : 1536;
  s.nope = glm ? 192 : 128;
  s.value = glm ? 256 : 128;
  s.index_heads = glm ? 32 : 64;
  s.index_pairs = glm ? RopePairs::kInterleaved : RopePairs::kHalf;
  s.theta = glm ? 8e6 : 1e4;
  s.factor = glm ? 1 : 40;
  s.original = glm ? 0 : 4096;
  s.eps = glm ? 1e-5f : 1e-6f;
  const double mscale = 0.1 * std::log(s.factor) + 1;
  s.scale = static_cast<float>(mscale * mscale / std::sqrt(static_cast<double>(s.head())));
  return s;
}

Spec v4(const std::string& model) {
  Spec s{.model = model, .window = 128, .rank = 1024, .q_norm = true};
  const bool pro = model == "v4-pro", v41 = is_v41(model);
  s.hidden = pro ? 7168 : v41 ? 5120 : 4096;
  s.heads = pro ? 128 : 64;
  s.q_lora = pro ? 1536 : v41 ? 1280 : 1024;
  s.groups = s.heads / 8;
  s.topk = pro ? 1024 : 512;
  s.scale = static_cast<float>(1 / std::sqrt(512.0));
  if (v41) {
    s.q_norm = false;
    s.eps = 1e-20f;
  }
  return s;
}

void add_compressor(Spec& s, int32_t ratio) {
  s.ratio = ratio;
  s.overlap = ratio == 4;
  s.gate = ratio > 1;
  s.bias = ratio > 2;
  s.theta = 160000;
  s.factor = 16;
  s.original = 65536;
}

}  // namespace

const std::vector<std::string>& models() {
  static const std::vector<std::string> all = {"v3.2", "glm-5", "v4-flash", "v4-pro", "v4.1-flash"};
  return all;
}

std::vector<std::string> kinds_of(const std::string& model) {
  if (model == "v3.2") return {"full"};
  if (model == "glm-5") return {"full", "shared"};
  if (is_v41(model)) return {"c2a", "c1a", "reindex", "reuse", "sliding"};
  return {"c4a", "c128a", "sliding"};
}

Spec spec_of(const std::string& model, const std::string& kind) {
  const std::vector<std::string> kinds = kinds_of(model);
  if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end())
    throw Error(ErrorCode::kInvalidArgument,
                "layer: --layer: " + model + " has " + joined(kinds) + ", found " + kind);
  Spec s = is_mla(model) ? mla(model) : v4(model);
  s.kind = kind;
  if (kind == "shared") {
    s.index_heads = 0;
    s.own_keys = false;
    s.chooses = false;
  }
  if (is_mla(model) || kind == "sliding") return s;
  if (!is_v41(model)) {
    add_compressor(s, kind == "c4a" ? 4 : 128);
    s.index_heads = kind == "c4a" ? 64 : 0;
    return s;
  }
  // Layers after the last source of entries read those of ratio 1.
  add_compressor(s, kind == "c2a" ? 2 : 1);
  s.latent_keys = true;
  s.index_heads = kind == "reuse" ? 0 : 32;
  s.own_entries = s.own_keys = kind == "c2a" || kind == "c1a";
  s.chooses = kind != "reuse";
  s.finds_blocks = kind == "c1a";
  s.within_blocks = kind == "reindex";
  return s;
}

std::vector<std::string> schedule_of(const std::string& model) {
  std::vector<std::string> all;
  const auto add = [&](const char* kind, int times) { all.insert(all.end(), times, kind); };
  if (model == "v3.2") add("full", 61);
  else if (model == "glm-5") {
    add("full", 3);
    for (int i = 0; i < 75; ++i) add(i % 4 == 3 ? "full" : "shared", 1);
  } else if (is_v41(model)) {
    add("sliding", 2);
    for (int i = 0; i < 18; ++i) add(i % 6 == 0 ? "c2a" : "reuse", 1);
    for (int i = 0; i < 20; ++i) add(i == 0 ? "c1a" : i % 4 == 0 ? "reindex" : "reuse", 1);
  } else {
    const bool pro = model == "v4-pro";
    add(pro ? "c128a" : "sliding", 2);
    for (int i = 0; i < (pro ? 29 : 20); ++i) {
      add("c4a", 1);
      add("c128a", 1);
    }
    add("c4a", 1);
  }
  return all;
}

std::vector<std::string> excerpt_of(const std::string& model) {
  std::vector<std::string> kept;
  for (const std::string& kind : schedule_of(model))
    if (std::find(kept.begin(), kept.end(), kind) == kept.end()) kept.push_back(kind);
  return kept;
}

std::vector<std::string> with_source(const std::string& model, const std::string& kind) {
  const Spec s = spec_of(model, kind);
  if (s.chooses && s.own_entries) return {kind};
  return {s.mla() ? "full" : "c1a", kind};
}

}  // namespace winnow::cli::whole
