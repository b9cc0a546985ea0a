// The k largest of an array of floats, by index. Machinery of select and of score_select.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

namespace winnow::internal::cpu {

// Integers in the order of the floats: -0 and +0 are both 0, NaN is below everything.
inline int32_t order_key(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x), magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return INT32_MIN;
  return bits < 0 ? -magnitude : magnitude;
}

// A row of `size` floats; the id of its first element is `base`.
struct TopkRow {
  const float* values = nullptr;
  int64_t size = 0;
  int32_t base = 0;
};

// ids = base + index of the ids.size() largest of the row, ascending; equal ones by lowest index;
// -1 behind a row that is too short. Exact and deterministic. `split` uses the pool within the row.
// Cost: three to five vector passes over the row, 4 B read per element and pass.
void topk(const TopkRow& row, std::span<int32_t> ids, bool split) noexcept;

// The values at ids that topk() gave for the row; -inf where an id is -1.
inline void take_values(const TopkRow& row, std::span<const int32_t> ids, float* out) noexcept {
  for (const int32_t id : ids)
    *out++ = id < 0 ? -std::numeric_limits<float>::infinity() : row.values[id - row.base];
}

}  // namespace winnow::internal::cpu
