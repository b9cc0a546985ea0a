// The shapes and contents that rotate is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/rotate.h"

namespace winnow::internal::rotate {

struct Case {
  std::string name;
  int64_t tokens, heads, width;
  RopePairs pairs = RopePairs::kInterleaved;
  RopeSlice slice = RopeSlice::kLast;
  bool inverse = false;
  bool in_place = false;
  bool paired_table = false;  // (cos, sin) side by side
  int64_t padding = 0;        // elements between heads
};

inline std::vector<Case> cases() {
  constexpr RopePairs kInterleaved = RopePairs::kInterleaved, kHalf = RopePairs::kHalf;
  constexpr RopeSlice kLast = RopeSlice::kLast, kFirst = RopeSlice::kFirst;
  return {
      {"v4_query", 5, 64, 512},
      {"v4_kv", 19, 1, 512, kInterleaved, kLast, false, true},
      {"v4_output", 3, 8, 512, kInterleaved, kLast, true, true},
      {"v32_query", 4, 16, 192, kInterleaved, kLast, false, true, true},
      {"v32_key", 9, 1, 64},
      {"v32_index", 7, 64, 128, kHalf, kFirst},
      {"glm_index", 6, 32, 128, kInterleaved, kFirst, false, false, true},
      {"half_last_inverse", 3, 2, 130, kHalf, kLast, true},
      {"odd_rows", 11, 3, 67, kInterleaved, kFirst, false, true, false, 1},
      {"half_padded", 8, 3, 97, kHalf, kLast, false, false, true, 5},
      {"v4_output_prefill", 20, 64, 512, kInterleaved, kLast, true},
      {"v4_output_odd_heads", 90, 13, 512, kInterleaved, kLast, true},
      {"v32_query_prefill", 70, 64, 192, kInterleaved, kLast, false, true},
      {"half_prefill", 40, 64, 256, kHalf, kLast},
      {"first_long", 3, 180, 256, kHalf, kFirst},  // past the caches, as v4_query
      {"no_tokens", 0, 4, 128},
      {"no_heads", 4, 0, 128},
  };
}

}  // namespace winnow::internal::rotate
