// The k largest of what does not lie side by side: columns of listed blocks, and blocks by their
// largest column. Machinery of select and of score_select.
//
// A key is found digit by digit: four passes count its bytes among the items that share the bytes
// before, and a fifth one gives the ids. Nothing is stored but 256 counters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/blocks.h"
#include "cpu/topk.h"

namespace winnow::internal::cpu {

// `visit(f)` calls f(id, key) for every item, ids ascending, keys as order_key() makes them. The
// ids.size() items of the largest keys, ascending, equal ones by lowest id; -1 behind them.
template <class Visit>
void topk_of(const Visit& visit, std::span<int32_t> ids) {
  const auto digits_of = [](int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; };
  uint32_t found = 0;                               // leading bytes of the last key that is given
  int64_t left = static_cast<int64_t>(ids.size());  // items to give among those that share them
  for (int shift = 24; shift >= 0 && left > 0; shift -= 8) {
    int64_t counts[256] = {};
    visit([&](int32_t, int32_t key) {
      const uint32_t digits = digits_of(key);
      const bool shares = shift == 24 || (digits ^ found) >> (shift + 8) == 0;
      counts[digits >> shift & 255] += shares;
    });
    int byte = 255;
    while (byte > 0 && counts[byte] < left) left -= counts[byte--];
    found |= static_cast<uint32_t>(byte) << shift;
  }
  size_t n = 0;
  visit([&](int32_t id, int32_t key) {
    const uint32_t digits = digits_of(key);
    if (n == ids.size() || digits < found || (digits == found && left <= 0)) return;
    left -= digits == found;
    ids[n++] = id;
  });
  std::fill(ids.begin() + static_cast<std::ptrdiff_t>(n), ids.end(), -1);
}

// Of a row whose column `range.first` stands at `values`: columns of the blocks that the list
// names, as select.h has it. `base` is taken from the ids.
inline void topk_within(const core::Blocks& blocks, std::span<const int32_t> within,
                        const float* values, const core::Range& range, int32_t base,
                        std::span<int32_t> ids) {
  const auto visit = [&](auto&& f) {
    int32_t before = -1;
    for (const int32_t block : within) {
      if (block <= before) continue;
      before = block;
      const core::Range columns = core::columns_of(blocks, block, range);
      for (int64_t c = columns.first; c < columns.last; ++c)
        f(static_cast<int32_t>(c) - base, order_key(values[c - range.first]));
    }
  };
  topk_of(visit, ids);
}

// The blocks of such a row with the largest columns; the last one comes first.
inline void best_blocks(const core::Blocks& blocks, const float* values, const core::Range& range,
                        std::span<int32_t> ids) {
  const auto visit = [&](auto&& f) {
    if (range.first >= range.last) return;
    const int64_t newest = (range.last - 1) / blocks.size;
    for (int64_t block = range.first / blocks.size; block <= newest; ++block) {
      const core::Range columns = core::columns_of(blocks, block, range);
      int32_t key = block == newest ? INT32_MAX : INT32_MIN;
      for (int64_t c = columns.first; c < columns.last; ++c)
        key = std::max(key, order_key(values[c - range.first]));
      f(static_cast<int32_t>(block), key);
    }
  };
  topk_of(visit, ids);
}

}  // namespace winnow::internal::cpu
