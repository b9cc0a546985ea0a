// The shapes and contents that score and score_select are tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow::internal::score {

enum class Fill {
  kNormal,
  kTiny,   // subnormal codes
  kWide,   // every finite code, so sums lose bits
  kCodes,  // every code, NaN included; scales and weights of any size, 0 and -0
  kZero,   // nothing is positive: all ties
};

struct Case {
  std::string name;
  int64_t tokens, heads, keys;  // keys: columns of the logits
  int32_t page = 0;             // 0: contiguous keys
  Fill fill = Fill::kNormal;
  int64_t next_n = 1;  // tokens of each request
  bool starts = false;
  bool clean = false;
  int64_t topk = 16;
  int64_t padding = 0;  // of every outer stride, in elements (pages: times 4 bytes, in bf16 16)
  bool bf16 = false;    // queries and keys
};

inline std::vector<Case> cases() {
  return {
      {"one_key", 1, 1, 1},
      {"no_tokens", 0, 4, 10},
      {"no_tokens_paged", 0, 4, 10, 64},
      {"no_keys", 3, 4, 0, 0, Fill::kNormal, 1, true, true},
      {"no_keys_paged", 3, 4, 0, 64},
      {"contiguous", 5, 64, 200, 0, Fill::kNormal, 1, true, true},
      {"contiguous_h16", 19, 16, 333, 0, Fill::kWide, 1, true, false, 33, 4},
      {"contiguous_h128", 3, 128, 150, 0, Fill::kTiny, 1, false, true, 150},
      {"paged_h64", 4, 64, 300, 64, Fill::kNormal, 1, false, true, 64},
      {"paged_next_2", 6, 32, 260, 64, Fill::kWide, 2, false, false, 100, 8},
      {"paged_next_3", 9, 8, 190, 16, Fill::kNormal, 3, true, true, 190},
      {"paged_next_3_h64", 9, 64, 330, 64, Fill::kWide, 3, true, true, 60},
      {"paged_next_4", 11, 50, 300, 64, Fill::kCodes, 4, false, true, 64, 4},
      {"paged_next_4_h32", 8, 32, 260, 128, Fill::kWide, 4, true, false, 20},
      {"paged_next_4_h16", 15, 16, 400, 64, Fill::kNormal, 4, true, true, 30},
      {"paged_next_5", 10, 64, 200, 64, Fill::kWide, 5, true, true, 50},
      {"paged_next_6_h16", 12, 9, 270, 64, Fill::kCodes, 6, false, true, 40, 4},
      {"paged_next_7_h32", 14, 30, 270, 64, Fill::kWide, 7, true, true, 40},
      {"page_1", 4, 12, 70, 1, Fill::kNormal, 2, true, true, 7},
      {"page_3_h1", 7, 1, 100, 3, Fill::kCodes, 1, true, false, 5, 1},
      {"page_256_h24", 3, 24, 700, 256, Fill::kWide, 1, false, true, 512},
      {"codes", 6, 48, 190, 64, Fill::kCodes, 2, true, true, 40, 3},
      {"codes_h17", 18, 17, 120, 0, Fill::kCodes, 1, true, true, 40, 1},
      {"h33", 2, 33, 129, 32, Fill::kWide, 2, false, true, 128},
      {"h65", 3, 65, 97, 32, Fill::kNormal, 1, true, true, 20},
      {"h65_next_3", 6, 65, 97, 64, Fill::kNormal, 3, true, true, 20},
      {"h80", 2, 80, 97, 0, Fill::kWide, 1, true, true, 20},
      {"h127", 2, 127, 65, 8, Fill::kWide, 1, true, true, 20},
      {"ties", 4, 20, 5000, 64, Fill::kZero, 2, true, false, 64},
      {"many_tokens", 70, 4, 90, 0, Fill::kNormal, 1, true, true, 8},
      {"long", 1, 8, 9000, 64, Fill::kNormal, 1, false, false, 2048},
      {"bf16", 5, 64, 200, 0, Fill::kNormal, 1, true, true, 33, 3, true},
      {"bf16_no_keys", 3, 4, 0, 0, Fill::kNormal, 1, true, true, 16, 0, true},
      {"bf16_paged", 9, 33, 330, 64, Fill::kWide, 3, true, true, 60, 0, true},
      {"bf16_page_3_h128", 4, 128, 170, 3, Fill::kNormal, 2, false, false, 20, 1, true},
      {"bf16_tiny", 3, 5, 70, 16, Fill::kTiny, 1, true, true, 20, 2, true},
      {"bf16_codes", 6, 17, 190, 64, Fill::kCodes, 2, true, true, 40, 3, true},
      {"bf16_ties", 4, 20, 500, 64, Fill::kZero, 2, true, false, 64, 0, true},
  };
}

}  // namespace winnow::internal::score
