// select with portable vectors: cpu::topk() does a row. Many rows run in parallel; few long ones
// are each cut into chunks.
#include "cpu/threads.h"
#include "cpu/topk.h"
#include "select/kernel.h"

namespace winnow::internal::select {

void simd(const Params& p) noexcept {
  const bool split = p.tokens < cpu::threads();
  const auto row = [&](int64_t t) {
    const auto [first, last] = p.ranges.of(t);
    cpu::topk({p.logits + t * p.logit_stride + first, last - first,
               p.relative ? 0 : static_cast<int32_t>(first)},
              {p.ids + t * p.id_stride, static_cast<size_t>(p.width)}, split);
  };
  if (split)
    for (int64_t t = 0; t < p.tokens; ++t) row(t);
  else cpu::parallel_for(p.tokens, [&](int64_t t, int) { row(t); });
}

}  // namespace winnow::internal::select
