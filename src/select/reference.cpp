// select, as specified.
#include <algorithm>
#include <cmath>
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

}  // namespace

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* row = p.logits + t * p.logit_stride;
    const auto [first, last] = p.ranges.of(t);
    const std::span<int32_t> ids(p.ids + t * p.id_stride, static_cast<size_t>(p.width));
    const auto columns = std::views::iota(static_cast<int32_t>(first), static_cast<int32_t>(last));
    const auto end = std::ranges::partial_sort_copy(columns, ids, [&](int32_t a, int32_t b) {
                       return before(row, a, b);
                     }).out;
    std::sort(ids.begin(), end);
    if (p.relative)
      for (auto id = ids.begin(); id != end; ++id) *id -= static_cast<int32_t>(first);
    std::fill(end, ids.end(), -1);
  }
}

}  // namespace winnow::internal::select
