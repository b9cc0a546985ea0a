// The shapes that prepare_query is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/prepare_query.h"

namespace winnow::internal::prepare_query {

struct Case {
  std::string name;
  int64_t tokens, heads, width;
  NormKind norm;
  bool weight = false;
  float eps = 1e-6f;
  bool in_place = false;
  int64_t padding = 0;  // elements between heads
  Rope rope = {};
};

inline std::vector<Case> cases() {
  using K = NormKind;
  const Rope first{.pairs = RopePairs::kHalf, .slice = RopeSlice::kFirst};
  return {
      {"v4", 5, 64, 512, K::kRms},
      {"v4_in_place", 7, 3, 512, K::kRms, false, 1e-6f, true},
      {"v41", 4, 8, 512, K::kNone},
      {"v32_rope_part", 6, 16, 64, K::kNone, false, 1e-6f, true, 128},
      {"weights_half_first", 5, 2, 130, K::kRms, true, 1e-5f, false, 3, first},
      {"layer_norm", 3, 4, 128, K::kLayer, true},
      {"no_tokens", 0, 4, 512, K::kRms},
  };
}

}  // namespace winnow::internal::prepare_query
