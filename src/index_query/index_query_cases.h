// The shapes that index_query is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/index_query.h"

namespace winnow::internal::index_query {

struct Case {
  std::string name;
  int64_t tokens, heads;
  bool bf16_out = false;
  ScaleMode scale = ScaleMode::kDefault;
  bool hadamard = false;
  bool bf16_weights = false;
  int64_t padding = 0;  // elements between heads
  RopePairs pairs = RopePairs::kInterleaved;
  RopeSlice slice = RopeSlice::kLast;
};

inline std::vector<Case> cases() {
  using S = ScaleMode;
  constexpr RopePairs kHalf = RopePairs::kHalf;
  constexpr RopeSlice kFirst = RopeSlice::kFirst;
  return {
      {"v4", 5, 64},
      {"v4_amax_hadamard", 7, 3, false, S::kAmax, true},
      {"v4_bf16", 6, 32, true, S::kDefault, false, true},
      {"v4_bf16_hadamard", 4, 5, true, S::kDefault, true},
      {"v32", 9, 16, false, S::kPow2, false, true, 8, kHalf, kFirst},
      {"glm", 3, 32, false, S::kAmax, false, false, 0, RopePairs::kInterleaved, kFirst},
      {"v4_odd_heads", 11, 13},
      {"v4_prefill", 70, 64},
      {"v32_prefill", 70, 64, false, S::kDefault, false, true, 8, kHalf, kFirst},
      {"long", 7, 300},  // codes of 128 KB for each of two workers, which go past the caches
      {"no_tokens", 0, 4},
      {"no_heads", 3, 0},
  };
}

}  // namespace winnow::internal::index_query
