// The shapes and contents that locate is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow::internal::locate {

struct Case {
  std::string name;
  int64_t tokens, width;
  int32_t page;
  int64_t pages, requests, table_width;
  int32_t rows_per_page = 0;
  bool workspace = false;
  int32_t world = 1, rank = 0, interleave = 1;
  bool compact = false;
};

inline std::vector<Case> cases() {
  return {
      {"small", 3, 5, 4, 7, 2, 3},
      {"no_tokens", 0, 8, 64, 4, 1, 2},
      {"no_columns", 4, 0, 64, 4, 2, 2},
      {"no_pages", 4, 9, 64, 0, 2, 0},
      {"empty_table", 4, 9, 64, 8, 2, 0},
      {"topk", 6, 2048, 64, 1000, 4, 32},
      {"odd_page", 5, 133, 3, 50, 3, 17},
      {"page_1", 5, 67, 1, 90, 3, 80},
      {"page_256_odd_width", 7, 1001, 256, 64, 5, 9},
      {"wide_rows", 4, 100, 64, 40, 2, 8, 65},
      {"workspace", 9, 70, 64, 40, 4, 8, 0, true},
      {"dcp_2", 4, 130, 64, 40, 2, 8, 0, false, 2, 1, 1, false},
      {"dcp_4_interleaved_compact", 4, 130, 16, 40, 2, 8, 0, false, 4, 2, 8, true},
      {"dcp_beyond_32_bits", 4, 130, 64, 40, 2, 8, 0, false, 1 << 30, 0, 1 << 9, false},
      {"compact_alone", 4, 130, 16, 40, 2, 8, 0, false, 1, 0, 1, true},
      {"long_rows", 3, 4509, 64, 1000, 2, 90},
      {"long_rows_compact", 3, 4509, 64, 1000, 2, 90, 0, false, 2, 1, 4, true},
      {"workspace_dcp", 6, 70, 64, 40, 4, 8, 0, true, 2, 0, 16, true},
  };
}

}  // namespace winnow::internal::locate
