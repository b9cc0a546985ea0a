// The shapes and contents that select is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow::internal::select {

enum class Fill {
  kNormal,
  kRelu,     // half exact zeros, some of them negative
  kEqual,    // one value
  kNan,      // nothing but NaN
  kSpecial,  // NaN, infinities, zeros, denormals, a few ordinary numbers
  kRising,   // every value beats those before it
  kFalling,  // the first k win
  kTwo,      // two neighbouring floats
  kSpike,    // sampled columns are huge: a sample of the row misleads
  kMissing,  // mostly -inf
  kHeavy,    // few values far above all others: the k-th may lie above a sample
  kNarrow,   // a range of some hundred neighbouring floats
  kRepeat,   // the same 4,096 values again and again
};

struct Case {
  std::string name;
  int64_t tokens, columns, topk;
  Fill fill = Fill::kNormal;
  bool starts = false, ends = false;  // given; hostile values among them
  bool relative = false;
  int64_t padding = 0;        // elements between rows
  int64_t device_tokens = 0;  // instead of `tokens` on a device
};

inline std::vector<Case> cases() {
  return {
      {"small", 3, 20, 5},
      {"no_tokens", 0, 20, 5},
      {"no_columns", 3, 0, 5},
      {"topk_0", 3, 20, 0},
      {"topk_1", 5, 1000, 1, Fill::kNormal, true, true},
      {"topk_of_all", 2, 77, 77},
      {"short_rows", 9, 100, 150, Fill::kSpecial, true, true, false, 3},
      {"ranges", 40, 999, 64, Fill::kNormal, true, true, true, 5},
      {"ends_only", 9, 513, 100, Fill::kRelu, false, true, false, 0},
      {"starts_relative", 9, 513, 100, Fill::kTwo, true, false, true, 0},
      {"special", 12, 4099, 257, Fill::kSpecial, true, true, true, 1},
      {"relu", 5, 6000, 2048, Fill::kRelu},
      {"relu_all_ties", 3, 9001, 7000, Fill::kRelu},
      {"equal", 4, 9000, 2048, Fill::kEqual, true, true},
      {"nan", 3, 9000, 100, Fill::kNan},
      {"two", 4, 12000, 2048, Fill::kTwo},
      {"rising", 4, 12001, 2048, Fill::kRising},
      {"falling", 4, 12001, 2048, Fill::kFalling},
      {"spike", 3, 20000, 64, Fill::kSpike},
      {"missing", 3, 20000, 2048, Fill::kMissing},
      {"long", 1, 130000, 2048},
      {"long_relu", 1, 100001, 2048, Fill::kRelu, true, true},
      {"long_special", 1, 66000, 30000, Fill::kSpecial},
      {"long_two", 1, 66000, 33000, Fill::kTwo},
      {"long_equal", 1, 66000, 5000, Fill::kEqual},
      {"long_nan", 1, 66000, 5000, Fill::kNan},
      {"longer", 1, 200000, 2048, Fill::kRelu, true, false, true, 1},
      {"heavy", 3, 40000, 64, Fill::kHeavy, true},
      {"narrow", 3, 20000, 300, Fill::kNarrow},
      // More than a twentieth: the sample of a cluster is quads of neighbours.
      {"tenth", 5, 20001, 2048, Fill::kNormal, true, true, true, 1},
      {"tenth_heavy", 2, 20000, 2000, Fill::kHeavy, true, false, false, 3},
      {"long_repeat", 2, 131072, 512, Fill::kRepeat},
      {"long_few", 1, 262144, 64},
      // Rows that a cluster's registers do not hold.
      {"longest", 1, 270000, 3000, Fill::kNormal, false, true},
      {"longest_ranges", 34, 66000, 600, Fill::kNormal, true, true, true, 1},
      {"longest_few", 1, 530001, 64, Fill::kHeavy, true, true, false, 3},
      {"longest_rising", 1, 300000, 2048, Fill::kRising},
      {"longest_falling", 1, 300001, 15000, Fill::kFalling, true, true, true, 1},
      {"longest_relu", 1, 300000, 2048, Fill::kRelu},
      {"longest_special", 1, 270000, 16000, Fill::kSpecial, true, false},
      {"longest_equal", 1, 300000, 700, Fill::kEqual},
      {"longest_two", 1, 300000, 15000, Fill::kTwo},
      {"longest_nan", 1, 270000, 64, Fill::kNan},
      {"longest_missing", 1, 270000, 5001, Fill::kMissing},
      {"longest_odd", 2, 263001, 5001, Fill::kNormal, false, true, false, 1},
      {"longest_narrow", 1, 270000, 200, Fill::kNarrow},
      {"longest_repeat", 1, 270336, 1024, Fill::kRepeat},
      {"longest_wide", 1, 270000, 20000},
      // More rows than half a device's multiprocessors: a block for each.
      {"many", 68, 9001, 300, Fill::kNormal, true, true, true, 3},
      {"many_relu", 68, 8300, 2048, Fill::kRelu, false, true},
      {"many_spikes", 68, 8300, 3000, Fill::kSpike},
      {"many_two", 68, 8300, 1000, Fill::kTwo},
      {"many_special", 68, 8300, 2500, Fill::kSpecial, true, false, false, 1},
      {"many_wide", 68, 8300, 4000, Fill::kNormal},
      {"many_wider", 68, 9000, 8500, Fill::kRelu, true, true},
      {"many_widest", 68, 12500, 11500, Fill::kNormal, true, true, true, 2},
      // The same with long rows and lists, of which there is a larger sample or more room: two rows
      // on a CPU.
      {"many_long", 2, 262144, 2048, Fill::kNormal, false, true, false, 0, 68},
      {"many_long_list", 2, 65536, 4096, Fill::kNormal, false, false, false, 1, 68},
      {"many_long_both", 2, 131072, 4096, Fill::kRelu, true, true, true, 0, 68},
      {"many_long_spikes", 2, 131072, 5000, Fill::kSpike, false, false, false, 0, 68},
      {"many_long_two", 2, 131072, 5000, Fill::kTwo, false, false, false, 3, 68},
  };
}

}  // namespace winnow::internal::select
