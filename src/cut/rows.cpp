// cut on the CPU: a rank's rows as they travel, and what of them is kept.
#include <algorithm>

#include "cpu/threads.h"
#include "cut/kernel.h"

namespace winnow::internal::cut {

// Values, then positions; rows after the last token are empty.
void pack(const OwnRows& own) noexcept {
  cpu::parallel_for(own.all_rows, [&](int64_t t, int) {
    float* const values = own.packed + t * 2 * own.width;
    int32_t* const positions = reinterpret_cast<int32_t*>(values + own.width);
    if (t >= own.tokens) {
      std::fill_n(values, own.width, 0.0f);
      std::fill_n(positions, own.width, -1);
      return;
    }
    std::copy_n(own.values + t * own.value_stride, own.width, values);
    const int32_t* const ids = own.ids + t * own.id_stride;
    for (int64_t k = 0; k < own.width; ++k) positions[k] = position_of(own.shard, ids[k]);
  });
}

// Writes at or before the id just read, so `kept` may be `ids`.
void keep(const Keeping& k) noexcept {
  const OwnRows& own = k.own;
  cpu::parallel_for(own.tokens, [&](int64_t t, int) {
    const int32_t* const ids = own.ids + t * own.id_stride;
    const float* const values = own.packed + t * 2 * own.width;
    const int32_t* const positions = reinterpret_cast<const int32_t*>(values + own.width);
    int32_t* const kept = k.kept ? k.kept + t * k.kept_stride : nullptr;
    int32_t count = 0;
    for (int64_t i = 0; i < own.width; ++i) {
      if (positions[i] < 0 || order_of(values[i], positions[i]) < k.cuts[t]) continue;
      if (kept) kept[count] = ids[i];
      ++count;
    }
    if (kept) std::fill(kept + count, kept + own.width, -1);
    if (k.counts) k.counts[t * k.count_stride] = count;
  });
}

}  // namespace winnow::internal::cut
