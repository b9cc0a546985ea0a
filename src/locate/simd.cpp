// locate with portable vectors: pages that are powers of two become shifts and a gather from the
// block table; rows run in parallel. Budget: 4 B read, 4 B gathered (the table row stays in L1), 4
// B written per id. Everything else (other page sizes, context parallelism) takes the scalar row,
// in parallel too.
#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "locate/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "locate/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::locate::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One row of paged ids, page = 1 << shift. Returns the number of valid entries.
int32_t paged_row(const Params& p, const Row& row, const int32_t* ids, int32_t* slots, int shift) {
  const hn::ScalableTag<int32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto minus_one = hn::Set(d, -1);
  const auto table_width = hn::Set(d, static_cast<int32_t>(p.table_width));
  const auto pages = hn::Set(d, static_cast<int32_t>(p.pages));
  const auto rows = hn::Set(d, p.rows_per_page), low = hn::Set(d, p.page - 1);
  int64_t k = 0;
  int32_t count = 0;
  for (; k + lanes <= p.width; k += lanes) {
    const auto id = hn::LoadU(d, ids + k);
    const auto page = hn::ShiftRightSame(id, shift);
    const auto inside = hn::And(hn::Gt(id, minus_one), hn::Lt(page, table_width));
    const auto found = hn::GatherIndex(d, row.table, hn::IfThenElseZero(inside, page));
    const auto valid = hn::And(inside, hn::And(hn::Gt(found, minus_one), hn::Lt(found, pages)));
    const auto slot = hn::Add(hn::Mul(found, rows), hn::And(id, low));
    hn::StoreU(hn::IfThenElse(valid, slot, minus_one), d, slots + k);
    count += static_cast<int32_t>(hn::CountTrue(d, valid));
  }
  for (; k < p.width; ++k) {
    slots[k] = slot_of(p, row, ids[k]);
    count += slots[k] >= 0;
  }
  return count;
}

}  // namespace winnow::internal::locate::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::locate {

HWY_EXPORT(paged_row);

void simd(const Params& p) noexcept {
  const bool shiftable = std::has_single_bit(static_cast<uint32_t>(p.page)) &&
                         p.parallel.world == 1 && !p.parallel.compact && p.table_width > 0;
  const int shift = std::countr_zero(static_cast<uint32_t>(p.page));
  const int64_t rows_per_task = 1 + 8192 / (p.width + 1);
  cpu::parallel_for(ceil_div(p.tokens, rows_per_task), [&](int64_t task, int) {
    const int64_t first = task * rows_per_task, last = std::min(first + rows_per_task, p.tokens);
    for (int64_t t = first; t < last; ++t) {
      const Row row = row_of(p, t);
      if (shiftable && row.table) {
        const int32_t n = HWY_DYNAMIC_DISPATCH(paged_row)(p, row, p.ids + t * p.id_stride,
                                                          p.slots + t * p.slot_stride, shift);
        if (p.counts) p.counts[t * p.count_stride] = n;
      } else {
        Params one = p;
        one.tokens = 1;
        one.ids += t * p.id_stride;
        one.slots += t * p.slot_stride;
        one.requests += t * p.request_stride;
        if (one.prefill_requests) one.prefill_requests += t * p.prefill_stride;
        if (one.counts) one.counts += t * p.count_stride;
        reference(one);
      }
    }
  });
}

}  // namespace winnow::internal::locate
#endif  // HWY_ONCE
