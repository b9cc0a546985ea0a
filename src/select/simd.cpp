// select with portable vectors: cpu::topk() does a row. Many rows run in parallel; few long ones
// are each cut into chunks. Blocks are found by plain loops (cpu/topk_blocks.h).
#include "cpu/threads.h"
#include "cpu/topk.h"
#include "cpu/topk_blocks.h"
#include "select/kernel.h"

namespace winnow::internal::select {

void simd(const Params& p) noexcept {
  const bool split = p.tokens < cpu::threads();
  const auto row = [&](int64_t t) {
    const core::Range range = p.ranges.of(t);
    const auto first = static_cast<int32_t>(range.first);
    const cpu::TopkRow values{p.logits + t * p.logit_stride + first, range.last - first,
                              p.relative ? 0 : first};
    const std::span<int32_t> ids(p.ids + t * p.id_stride, static_cast<size_t>(p.width));
    if (p.blocks.restricts)
      cpu::topk_within(p.blocks, p.blocks.within_of(t), values.values, range,
                       p.relative ? first : 0, ids);
    else cpu::topk(values, ids, split);
    if (p.blocks.finds) cpu::best_blocks(p.blocks, values.values, range, p.blocks.best_of(t));
    if (p.values) cpu::take_values(values, ids, p.values + t * p.value_stride);
  };
  if (split && !p.blocks.given())
    for (int64_t t = 0; t < p.tokens; ++t) row(t);
  else cpu::parallel_for(p.tokens, [&](int64_t t, int) { row(t); });
}

}  // namespace winnow::internal::select
