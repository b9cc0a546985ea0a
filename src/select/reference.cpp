// select, as specified.
#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>

#include "select/kernel.h"

namespace winnow::internal::select {

namespace {

// Whether column a goes before column b: larger value, NaN last, then lower index.
bool before(const float* row, int32_t a, int32_t b) {
  const bool a_nan = std::isnan(row[a]), b_nan = std::isnan(row[b]);
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && row[a] != row[b]) return row[a] > row[b];
  return a < b;
}

// Whether the list names the block: it ascends, and what does not is passed over.
bool names(std::span<const int32_t> within, int64_t block) {
  int32_t before = -1;
  for (const int32_t b : within) {
    if (b <= before) continue;
    if (b == block) return true;
    before = b;
  }
  return false;
}

// The best column of a block, by the order of columns.
int32_t best_of(const core::Blocks& blocks, int32_t block, const float* row, const Range& range) {
  const Range columns = core::columns_of(blocks, block, range);
  auto best = static_cast<int32_t>(columns.first);
  for (auto c = best + 1; c < columns.last; ++c)
    if (before(row, c, best)) best = c;
  return best;
}

void find_blocks(const Params& p, int64_t t, const float* row, const Range& range) {
  const std::span<int32_t> ids = p.blocks.best_of(t);
  const bool any = range.first < range.last;
  const auto first = static_cast<int32_t>(range.first / p.blocks.size);
  const auto newest = static_cast<int32_t>(any ? (range.last - 1) / p.blocks.size : first - 1);
  const auto goes_before = [&](int32_t a, int32_t b) {
    if (a == newest || b == newest) return a == newest && b != newest;
    return before(row, best_of(p.blocks, a, row, range), best_of(p.blocks, b, row, range));
  };
  const auto end =
      std::ranges::partial_sort_copy(std::views::iota(first, newest + 1), ids, goes_before).out;
  std::sort(ids.begin(), end);
  std::fill(end, ids.end(), -1);
}

}  // namespace

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* row = p.logits + t * p.logit_stride;
    const Range range = p.ranges.of(t);
    const auto first = static_cast<int32_t>(range.first), last = static_cast<int32_t>(range.last);
    const std::span<int32_t> ids(p.ids + t * p.id_stride, static_cast<size_t>(p.width));
    const auto counts = [&](int32_t c) {
      return !p.blocks.restricts || names(p.blocks.within_of(t), c / p.blocks.size);
    };
    auto columns = std::views::iota(first, last) | std::views::filter(counts);
    const auto end = std::ranges::partial_sort_copy(columns, ids, [&](int32_t a, int32_t b) {
                       return before(row, a, b);
                     }).out;
    std::sort(ids.begin(), end);
    if (p.values) {
      float* values = p.values + t * p.value_stride;
      const float* const behind = values + p.width;
      for (auto id = ids.begin(); id != end; ++id) *values++ = row[*id];
      while (values != behind) *values++ = -std::numeric_limits<float>::infinity();
    }
    if (p.relative)
      for (auto id = ids.begin(); id != end; ++id) *id -= first;
    std::fill(end, ids.end(), -1);
    if (p.blocks.finds) find_blocks(p, t, row, range);
  }
}

}  // namespace winnow::internal::select
