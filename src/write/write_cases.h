// The shapes and contents that the write stage is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/write.h"

namespace winnow::internal::write {

struct Case {
  std::string name;
  CacheFormat format;
  ScaleMode scale;
  int64_t tokens;  // length of slots
  int32_t page;
  int64_t pages;
  int64_t spare_rows = 0;    // kv rows behind the last token
  int64_t row_padding = 0;   // elements between rows of kv
  int64_t page_padding = 0;  // bytes behind a page
  bool split = false;        // RoPE in a tensor of its own
};

inline std::vector<Case> cases() {
  using F = CacheFormat;
  using S = ScaleMode;
  return {
      {"v32_amax", F::kV32Fp8, S::kDefault, 37, 64, 3},
      {"v32_pow2", F::kV32Fp8, S::kPow2, 21, 64, 2, 3, 64},
      {"v32_odd_page_split", F::kV32Fp8, S::kAmax, 19, 7, 5, 1, 5, 48, true},
      {"v32_page_1", F::kV32Fp8, S::kPow2, 8, 1, 11},
      {"v32_bf16", F::kV32Bf16, S::kDefault, 18, 16, 2},
      {"v32_bf16_split", F::kV32Bf16, S::kDefault, 9, 3, 5, 2, 8, 16, true},
      {"v4_pow2", F::kV4Fp8, S::kDefault, 40, 64, 2},
      {"v4_floor_amax", F::kV4Fp8, S::kPow2FloorAmax, 33, 64, 2, 0, 3},
      {"v4_page_2", F::kV4Fp8, S::kPow2, 9, 2, 7, 2, 0, 0, true},
      {"v4_page_256_padded", F::kV4Fp8, S::kPow2, 100, 256, 1, 0, 0, 576},
      {"v4_bf16", F::kV4Bf16, S::kDefault, 12, 64, 1, 5, 16},
      {"index_pow2", F::kIndexKeys, S::kDefault, 50, 64, 2, 0, 7},
      {"index_amax", F::kIndexKeys, S::kAmax, 23, 5, 6, 2, 0, 12},
      {"index_bf16", F::kIndexKeysBf16, S::kDefault, 23, 5, 6, 2, 3, 16},
      // Long calls, whose records the CPU's vectors store past the caches where they may: from
      // 128 KB for each worker on.
      {"v4_long", F::kV4Fp8, S::kDefault, 950, 64, 16},
      {"v4_bf16_long", F::kV4Bf16, S::kDefault, 600, 64, 10},
      {"v32_bf16_long_split", F::kV32Bf16, S::kDefault, 480, 3, 170, 0, 8, 0, true},
      {"index_long", F::kIndexKeys, S::kDefault, 4200, 64, 70},
      {"index_bf16_long", F::kIndexKeysBf16, S::kDefault, 2100, 16, 140},
      {"index_bf16_long_unaligned", F::kIndexKeysBf16, S::kDefault, 2100, 16, 140, 0, 0, 16},
      {"no_tokens", F::kV32Fp8, S::kDefault, 0, 64, 1},
      {"no_pages", F::kV4Fp8, S::kDefault, 3, 64, 0},  // every slot is padding
  };
}

}  // namespace winnow::internal::write
