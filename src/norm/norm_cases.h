// The shapes and contents that norm is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/norm.h"

namespace winnow::internal::norm {

struct Case {
  std::string name;
  NormKind kind;
  int64_t rows, width;
  bool weight = true, bias = false;
  float eps = 1e-6f;
  int64_t second_width = 0;  // of a second set of rows; 0: none
  int64_t padding = 0;       // elements between rows
  bool in_place = false;
  float offset = 3;         // the mean of a kLayer's rows, of which the deviation is 1
  int exponent = 0;         // of the values
  int weight_exponent = 0;  // and of the weights
};

inline std::vector<Case> cases() {
  using K = NormKind;
  return {
      {"rms_query_and_kv", K::kRms, 7, 1536, true, false, 1e-6f, 512},
      {"rms_glm", K::kRms, 3, 2048, true, false, 1e-5f, 512, 64},
      {"rms_unweighted", K::kRms, 33, 512, false},
      {"rms_tiny_eps", K::kRms, 5, 1280, true, false, 1e-20f},
      {"rms_bias", K::kRms, 4, 96, true, true},
      {"layer_index_key", K::kLayer, 19, 128, true, true},
      {"layer_plain", K::kLayer, 6, 128, false, false, 1e-6f, 0, 3},
      {"in_place", K::kRms, 9, 512, true, false, 1e-6f, 0, 8, true},
      {"in_place_long", K::kRms, 9, 2048, true, false, 1e-6f, 0, 8, true},
      {"batch", K::kRms, 200, 1536, true, false, 1e-6f, 512},
      {"odd_width", K::kRms, 5, 77, true, false, 1e-6f, 1},
      {"one_value", K::kLayer, 3, 1, true, true},
      {"many_rows", K::kRms, 300, 128},
      {"prefill", K::kRms, 1100, 1536, true, false, 1e-6f, 512},
      {"prefill_of_v4", K::kRms, 1030, 1024, true, false, 1e-6f, 0, 8},
      {"prefill_short", K::kRms, 1025, 512},
      {"prefill_bias", K::kRms, 1025, 256, true, true},
      {"no_rows", K::kRms, 0, 512},
  };
}

// Rows that take other ways through the CPU's vectors: means below and about the one from which on
// squares are summed about it, squares about those that count as zeros in AVX-512 BF16, and results
// that are subnormal.
inline std::vector<Case> cpu_cases() {
  using K = NormKind;
  return {
      {.name = "layer_about_zero", .kind = K::kLayer, .rows = 19, .width = 128, .offset = 0},
      {.name = "layer_near_zero", .kind = K::kLayer, .rows = 37, .width = 256, .offset = 0.57f},
      {.name = "tiny_rows",
       .kind = K::kRms,
       .rows = 21,
       .width = 512,
       .eps = 1e-36f,
       .exponent = -54},
      {.name = "tiny_results", .kind = K::kRms, .rows = 21, .width = 512, .weight_exponent = -129},
      {.name = "tiny_results_long",
       .kind = K::kRms,
       .rows = 5,
       .width = 1536,
       .weight_exponent = -129},
  };
}

}  // namespace winnow::internal::norm
