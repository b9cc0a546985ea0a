// norm with portable vectors, parallel over rows. Budget: a row is read from memory once (the
// second pass finds it in L1) and written once, 4 B a value; a dozen vector operations for a
// vector.
#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "norm/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "norm/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/norm_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::norm::HWY_NAMESPACE {

// Asks for a row, for L2: more lines than L1 can wait for would stop the row at hand.
HWY_INLINE void prefetch_row(const bf16* x, int64_t width) {
  constexpr int64_t kValues = 32;  // in a line
  for (int64_t i = 0; i < width; i += kValues) __builtin_prefetch(x + i, 0, 2);
}

void norm_rows(const Rows& rows, int64_t first, int64_t last) {
  const cpu::HWY_NAMESPACE::RowNorm norm(rows.norm, rows.width);
  for (int64_t i = first; i < last; ++i) {
    if (i + 1 < last) prefetch_row(rows.x + (i + 1) * rows.x_stride, rows.width);
    norm(rows.x + i * rows.x_stride, rows.out + i * rows.out_stride);
  }
}

}  // namespace winnow::internal::norm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::norm {

HWY_EXPORT(norm_rows);

void simd(const Params& p) noexcept {
  for (const Rows& rows : p.rows) {
    if (rows.count == 0) continue;
    // 64 KB of traffic, above the cost of a task; 1 MB where every worker has some, since short
    // pieces of memory in turn with other workers' come at two thirds of the rate.
    const int64_t least = 1 + 16384 / rows.width;
    const int64_t block = std::clamp(rows.count / (8 * cpu::threads()), least, 16 * least);
    cpu::parallel_for(ceil_div(rows.count, block), [&](int64_t task, int) {
      const int64_t first = task * block;
      HWY_DYNAMIC_DISPATCH(norm_rows)(rows, first, std::min(first + block, rows.count));
    });
  }
}

}  // namespace winnow::internal::norm
#endif  // HWY_ONCE
