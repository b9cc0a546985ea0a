// topk_mask, as specified; and the same with rows shared out to the workers. A row is cleared and
// then has K bits set: nothing for vectors to do beyond the clearing.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "mask/kernel.h"

namespace winnow::internal::mask {

namespace {

void row(const Params& p, int64_t t) {
  uint8_t* mask = p.mask + t * p.mask_stride;
  if (p.bytes > 0) std::memset(mask, 0, p.bytes);
  int64_t limit = 8 * p.bytes;
  if (p.lengths) limit = std::min<int64_t>(limit, p.lengths[t * p.length_stride]);
  for (int64_t k = 0; k < p.topk; ++k) {
    const int32_t id = p.ids[t * p.id_stride + k];
    if (id >= 0 && id < limit) mask[id / 8] |= static_cast<uint8_t>(1u << id % 8);
  }
}

}  // namespace

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) row(p, t);
}

void simd(const Params& p) noexcept {
  const int64_t per_task = 1 + 32768 / (p.bytes + p.topk + 1);
  cpu::parallel_for(ceil_div(p.tokens, per_task), [&](int64_t task, int) {
    const int64_t end = std::min(p.tokens, (task + 1) * per_task);
    for (int64_t t = task * per_task; t < end; ++t) row(p, t);
  });
}

}  // namespace winnow::internal::mask
