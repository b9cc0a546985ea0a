#include "core/blocks.h"

namespace winnow::internal::core {

Blocks checked_blocks(const Check& check, const SelectBlocks& b, int64_t tokens) {
  Blocks r;
  r.restricts = check.optional(b.within, "blocks.within", DType::kI32, {tokens, Check::kAny});
  r.finds = static_cast<bool>(b.best);
  if (!r.given()) return r;
  r.size = static_cast<int32_t>(check.range(b.size, "blocks.size", 1, INT32_MAX));
  if (r.restricts) {
    r.within = static_cast<const int32_t*>(b.within.data);
    r.within_stride = b.within.stride[0];
    r.within_count = b.within.shape[1];
  }
  if (r.finds) {
    check.output(b.best, "blocks.best", DType::kI32, {tokens, Check::kAny});
    check.tensor(b.best, "blocks.best", DType::kI32, {tokens, Check::kAny});
    r.best = static_cast<int32_t*>(b.best.data);
    r.best_stride = b.best.stride[0];
    r.best_count = b.best.shape[1];
  }
  return r;
}

}  // namespace winnow::internal::core
