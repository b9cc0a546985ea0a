// The attention layers of real models as data: sizes, RoPE, compressors, and their order in a
// model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/rotate.h"

namespace winnow::cli::whole {

// One layer. V3.2 and GLM have `nope` and `value`; V4 and V4.1 have heads of 512 and a window.
struct Spec {
  std::string model, kind;
  int64_t hidden = 0, heads = 0, q_lora = 0;
  int64_t nope = 0, value = 0;
  int64_t index_heads = 0, topk = 0;  // no heads: the layer has no indexer of its own
  RopePairs index_pairs = RopePairs::kInterleaved;
  RopeSlice index_slice = RopeSlice::kLast;
  int32_t window = 0;
  int64_t groups = 0, rank = 0;
  int32_t ratio = 0;  // tokens of a compressed entry; 0: none
  bool overlap = false, gate = false, bias = false;
  bool q_norm = false;  // of each query head
  // V4.1: index keys are made of the entries, not by a compressor of their own; blocks of 8 entries
  // that a layer finds for those after it, or takes from one before it.
  bool latent_keys = false, finds_blocks = false, within_blocks = false;
  // Caches and choices may be those of an earlier layer of the schedule.
  bool own_entries = true, own_keys = true, chooses = true;
  double theta = 10000, factor = 1;
  int64_t original = 0;
  float eps = 1e-6f, scale = 0;

  bool mla() const { return nope > 0; }
  bool compressed() const { return ratio > 0; }
  bool indexed() const { return index_heads > 0; }
  int64_t head() const { return mla() ? nope + kRopeDim : 512; }  // of a projected query
  int64_t record() const { return mla() ? 576 : 512; }
  int64_t values() const { return overlap ? 2 : 1; }  // of d each in a compressor's row
  int64_t columns(int64_t d) const { return (gate ? 2 : 1) * values() * d; }
};

// "v3.2", "glm-5", "v4-flash", "v4-pro", "v4.1-flash"; "v4" is the first of its two.
const std::vector<std::string>& models();
// The kinds of layers that a model has, the most typical first.
std::vector<std::string> kinds_of(const std::string& model);
// Throws Error naming the kinds there are.
Spec spec_of(const std::string& model, const std::string& kind);

// The model's layers, first to last. V4.1: "c2a" and "c1a" keep entries and index keys, "reindex"
// chooses anew among those, "reuse" takes the choice too.
std::vector<std::string> schedule_of(const std::string& model);
// The first layer of each kind, in the order of the schedule.
std::vector<std::string> excerpt_of(const std::string& model);
// A layer of this kind behind the one whose caches or choice it needs, if it needs one.
std::vector<std::string> with_source(const std::string& model, const std::string& kind);

}  // namespace winnow::cli::whole
