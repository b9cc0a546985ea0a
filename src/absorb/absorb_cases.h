// The shapes that the projections are tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow::internal::absorb {

struct Case {
  std::string name;
  int64_t tokens, heads, latent, nope, value, rope;
  enum Weights { kLatentFirst, kHeadFirst, kCheckpoint } weights;  // layout of [L, H, *] in memory
  int64_t padding = 0;  // between rows of inputs and outputs
};

inline std::vector<Case> cases() {
  return {
      {"one_token", 1, 2, 512, 128, 128, 64, Case::kLatentFirst},
      {"one_of_each", 1, 1, 1, 1, 1, 1, Case::kLatentFirst},
      {"blocks", 17, 3, 64, 48, 80, 64, Case::kHeadFirst, 8},
      {"odd", 13, 5, 37, 19, 23, 7, Case::kLatentFirst, 3},
      {"odd_checkpoint", 29, 2, 101, 13, 31, 5, Case::kCheckpoint, 1},
      {"model", 5, 1, 512, 128, 128, 64, Case::kCheckpoint},
      {"wide_value", 5, 1, 96, 192, 512, 64, Case::kLatentFirst},
      {"deep", 3, 1, 1100, 520, 40, 0, Case::kHeadFirst},  // more than one panel in both ways
      {"stripes", 150, 1, 40, 24, 24, 16, Case::kLatentFirst},
      {"stripes_deep", 70, 1, 600, 9, 10, 2, Case::kCheckpoint},
      {"prefill", 130, 1, 192, 128, 136, 64, Case::kHeadFirst},
      {"prefill_checkpoint", 130, 1, 72, 56, 64, 64, Case::kCheckpoint, 8},
      {"prefill_mixed", 130, 2, 64, 8, 136, 0, Case::kHeadFirst},
      {"stream", 331, 32, 328, 8, 8, 8, Case::kHeadFirst},
      {"stream_checkpoint", 331, 32, 136, 24, 8, 8, Case::kCheckpoint, 8},
      {"expand", 515, 1, 264, 72, 128, 64, Case::kHeadFirst},
      {"expand_latent_first", 131, 2, 512, 128, 72, 0, Case::kLatentFirst, 8},
      {"expand_checkpoint", 260, 2, 296, 128, 80, 24, Case::kCheckpoint, 8},
      {"no_tokens", 0, 2, 16, 8, 8, 4, Case::kLatentFirst},
      {"no_heads", 3, 0, 16, 8, 8, 4, Case::kLatentFirst},
      {"no_nope", 3, 2, 16, 0, 8, 4, Case::kLatentFirst},
      {"no_latent", 3, 2, 0, 8, 8, 4, Case::kLatentFirst},
  };
}

}  // namespace winnow::internal::absorb
