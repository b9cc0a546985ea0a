// V4's index lists, as specified: entry by entry.
#include "lists/kernel.h"

namespace winnow::internal::lists::reference {

void slots(const SlotsParams& p) noexcept {
  for (int64_t t = 0; t < p.slot_count; ++t) p.slots[t] = compressed_slot(p, t);
}

void runs(const RunParams& p) noexcept {
  for (int64_t t = 0; t < p.tokens.count; ++t) {
    const Run r = run_of(p, t);
    for (int64_t k = 0; k < p.out.width; ++k)
      p.out.data[t * p.out.stride + k] = run_entry(p, t, r, k);
    p.out.lengths[t] = static_cast<int32_t>(r.length);
  }
}

void combined(const CombinedParams& p) noexcept {
  for (int64_t t = 0; t < p.tokens.count; ++t) {
    const Combined c = combined_of(p, t);
    for (int64_t k = 0; k < p.out.width; ++k)
      p.out.data[t * p.out.stride + k] = combined_entry(p, t, c, k);
    p.out.lengths[t] = static_cast<int32_t>(c.states + c.tokens);
  }
}

}  // namespace winnow::internal::lists::reference
