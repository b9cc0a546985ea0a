// The compressors and contents that compress is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/compress.h"

namespace winnow::internal::compress {

struct Case {
  std::string name;
  CacheFormat format;
  int32_t ratio;
  bool overlap, gate, bias;
  std::vector<int32_t> lengths;  // of each request
  int32_t block = 4;             // rows of the paged state's blocks
  bool bf16_rows = false;
  bool hadamard = false;
  float eps = 1e-6f;
  bool paired_table = false;
  int32_t page = 4;  // of the cache

  int64_t width() const { return record_dim(format); }
  int64_t values() const { return (overlap ? 2 : 1) * width(); }
  int32_t window() const { return (overlap ? 2 : 1) * ratio; }
};

inline std::vector<Case> cases() {
  using F = CacheFormat;
  return {
      {"c4a", F::kV4Fp8, 4, true, true, true, {23, 4, 9}},
      {"c4a_odd_pages", F::kV4Fp8, 4, true, true, true, {23, 9}, 4, false, false, 1e-6f, false, 3},
      {"c4a_bf16", F::kV4Bf16, 4, true, true, true, {17, 8}, 3, true, false, 1e-6f, false, 3},
      {"c4a_index", F::kIndexKeys, 4, true, true, true, {30, 3, 16}, 4, false, false},
      {"c4a_index_hadamard", F::kIndexKeys, 4, true, true, true, {21}, 5, true, true},
      {"c4a_index_bf16", F::kIndexKeysBf16, 4, true, true, true, {18, 7}, 4},
      {"c4a_index_long", F::kIndexKeys, 4, true, true, true, {530, 5}, 4},  // a prefill on a device
      {"c4a_long", F::kV4Fp8, 4, true, true, true, {530, 5}, 4},  // on a CPU: past its caches
      {"c4a_bf16_long", F::kV4Bf16, 4, true, true, true, {600}, 3, true},
      {"c128a", F::kV4Fp8, 128, false, true, true, {261, 130}, 8},
      {"c128a_pages_of_16", F::kV4Fp8, 128, false, true, true, {261, 130}, 16},
      {"c128a_long", F::kV4Fp8, 128, false, true, true, {600, 7}, 8},
      {"c128a_odd_pages",
       F::kV4Fp8,
       128,
       false,
       true,
       true,
       {261},
       8,
       false,
       false,
       1e-6f,
       false,
       3},
      {"c128a_index_long", F::kIndexKeys, 128, false, true, true, {600, 7}, 8},
      {"c128a_bf16", F::kV4Bf16, 128, false, true, true, {140}, 7, true, false, 1e-6f, true},
      {"v41_ratio_2", F::kV4Fp8, 2, false, true, false, {11, 6}, 8, false, false, 1e-20f},
      {"v41_ratio_2_long", F::kV4Fp8, 2, false, true, false, {523, 6}, 8},
      {"v41_ratio_1", F::kV4Fp8, 1, false, false, false, {9, 5}, 8, false, false, 1e-20f},
      {"v41_ratio_1_bf16_rows", F::kV4Bf16, 1, false, false, false, {6}, 8, true},
      {"ratio_3_no_bias", F::kV4Bf16, 3, false, true, false, {20, 2}, 2},
      {"ratio_1_with_gate", F::kIndexKeys, 1, false, true, true, {5}, 2},
  };
}

}  // namespace winnow::internal::compress
