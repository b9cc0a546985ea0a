// locate, as specified.
#include "locate/kernel.h"

namespace winnow::internal::locate {

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const Row row = row_of(p, t);
    const int32_t* ids = p.ids + t * p.id_stride;
    int32_t* slots = p.slots + t * p.slot_stride;
    int32_t count = 0;
    for (int64_t k = 0; k < p.width; ++k) {
      const int32_t slot = slot_of(p, row, ids[k]);
      count += slot >= 0;
      // Compaction writes at or before the id just read, so `slots` may be `ids`.
      if (!p.parallel.compact) slots[k] = slot;
      else if (slot >= 0) slots[count - 1] = slot;
    }
    if (p.parallel.compact)
      for (int64_t k = count; k < p.width; ++k) slots[k] = -1;
    if (p.counts) p.counts[t * p.count_stride] = count;
  }
}

}  // namespace winnow::internal::locate
