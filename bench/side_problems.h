// Synthetic inputs of the verbs beside the flow: mha, merge, mask, lists, absorb (problems.h has
// those of the stages).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "buffer.h"
#include "placement.h"
#include "problems.h"
#include "winnow/absorb.h"
#include "winnow/lists.h"
#include "winnow/mask.h"
#include "winnow/merge.h"
#include "winnow/mha.h"

namespace winnow::bench {

// Causal attention of the last s_q of each request's `context` tokens over decompressed keys of 192
// and values of 128; with a top-k, over that many chosen ones of each token.
struct MhaProblem {
  explicit MhaProblem(const Sizes& s);
  Placement placement;
  MhaArgs args;
  tools::Buffer<bf16> q, k, v, out;
  tools::Buffer<int32_t> ids, starts, lengths;
  double flops() const { return flops_; }
  double bytes() const;

 private:
  double flops_ = 0;
};

// Partial results of attention over `parts` parts of the lists, 512 values a head.
struct MergeProblem {
  MergeProblem(const Sizes& s, int64_t parts);
  Placement placement;
  MergeArgs args;
  tools::Buffer<bf16> partial_out, out;
  tools::Buffer<float> partial_lse, lse;
  double bytes() const;
};

// Bits of `topk` ids of each token among `context` keys.
struct MaskProblem {
  explicit MaskProblem(const Sizes& s);
  Placement placement;
  TopkMaskArgs args;
  tools::Buffer<int32_t> ids;
  tools::Buffer<uint8_t> mask;
  double bytes() const;
};

// Queries into the latent space and outputs out of it, 128 x 512 a head. Weights have the heads
// outermost, as a loader that reads them once lays them out.
struct AbsorbProblem {
  explicit AbsorbProblem(const Sizes& s);
  Placement placement;
  AbsorbQueryArgs query;
  ProjectOutputArgs output;
  tools::Buffer<bf16> weight, queries, latents, absorbed, projected;
  double flops() const;  // of either
  double bytes() const;
};

// V4's lists of the last s_q tokens of each request. `kind`: one of kListKinds.
inline constexpr std::array<std::string_view, 4> kListKinds{"slots", "c128a", "window", "combined"};

struct ListsProblem {
  ListsProblem(const Sizes& s, std::string_view kind);
  // Runs the kind's call with this kernel (null: the library's choice).
  void run(const char* kernel);
  Placement placement;
  Paging paging;
  tools::Buffer<int32_t> positions, topk, seq_lens, gather_lens, lists, lengths;
  tools::Buffer<int64_t> slots;
  Tensor out;            // the lists, or the slots
  double bytes() const;  // that are written

 private:
  std::string_view kind_;
  CompressedSlotsArgs slots_args_;
  C128aListsArgs c128a_args_;
  WindowListsArgs window_args_;
  CombinedListsArgs combined_args_;
};

}  // namespace winnow::bench
