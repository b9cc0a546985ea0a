// V4's index lists with portable vectors: a row is a few stretches of consecutive numbers (one per
// page where it goes through a block table), so it is stored a vector at a time and read nowhere.
// Rows run in parallel. Budget: 4 B written per entry.
#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "lists/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lists/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::lists::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// first, first + 1, ...
void count_up(int32_t first, int64_t n, int32_t* out) {
  const hn::ScalableTag<int32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto step = hn::Set(d, static_cast<int32_t>(lanes));
  auto v = hn::Iota(d, first);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes, v = hn::Add(v, step)) hn::StoreU(v, d, out + i);
  for (; i < n; ++i) out[i] = first + static_cast<int32_t>(i);
}

// base + id where 0 <= id < limit, else -1. The sums of valid ids fit.
void move_ids(std::span<const int32_t> ids, int32_t limit_, int32_t base_, int32_t* out) {
  const int64_t n = static_cast<int64_t>(ids.size());
  const hn::ScalableTag<int32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto minus_one = hn::Set(d, -1), limit = hn::Set(d, limit_), base = hn::Set(d, base_);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto id = hn::LoadU(d, ids.data() + i);
    const auto valid = hn::And(hn::Gt(id, minus_one), hn::Lt(id, limit));
    hn::StoreU(hn::IfThenElse(valid, hn::Add(id, base), minus_one), d, out + i);
  }
  for (; i < n; ++i) out[i] = ids[i] >= 0 && ids[i] < limit_ ? ids[i] + base_ : -1;
}

}  // namespace winnow::internal::lists::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::lists {

HWY_EXPORT(count_up);
HWY_EXPORT(move_ids);

namespace simd {

namespace {

void put(int64_t first, int64_t n, int32_t* out) {
  HWY_DYNAMIC_DISPATCH(count_up)(static_cast<int32_t>(first), n, out);
}

void put_moved(std::span<const int32_t> ids, int64_t limit, int64_t base, int32_t* out) {
  const auto small = static_cast<int32_t>(limit);
  HWY_DYNAMIC_DISPATCH(move_ids)(ids, small, static_cast<int32_t>(base), out);
}

// f(t) for every row, a few per task.
template <class F>
void each_row(int64_t rows, int64_t width, F&& f) {
  const int64_t per_task = 1 + 16384 / (width + 1);
  cpu::parallel_for(ceil_div(rows, per_task), [&](int64_t task, int) {
    const int64_t last = std::min((task + 1) * per_task, rows);
    for (int64_t t = task * per_task; t < last; ++t) f(t);
  });
}

}  // namespace

void slots(const SlotsParams& p) noexcept {
  each_row(p.slot_count, 1, [&](int64_t t) { p.slots[t] = compressed_slot(p, t); });
}

void runs(const RunParams& p) noexcept {
  each_row(p.tokens.count, p.out.width, [&](int64_t t) {
    const Run r = run_of(p, t);
    int32_t* row = p.out.data + t * p.out.stride;
    if (p.window > 0 && p.shard.world > 1) {
      // A window's positions of one rank: at most 128 of them, in stretches of the interleave.
      for (int64_t k = 0; k < r.length; ++k) row[k] = run_entry(p, t, r, k);
    } else if (t >= p.slot_rows) {
      put(r.first, r.length, row);
    } else {
      for (int64_t k = 0; k < r.length;) {
        const int64_t left = p.table.page - (r.first + k) % p.table.page;
        const int64_t n = std::min(left, r.length - k);
        const int64_t slot = slot_of(p.table, p.tokens.requests[t], r.first + k);
        if (slot >= 0) put(slot, n, row + k);
        else std::fill_n(row + k, n, -1);
        k += n;
      }
    }
    std::fill(row + r.length, row + p.out.width, -1);
    p.out.lengths[t] = static_cast<int32_t>(r.length);
  });
}

void combined(const CombinedParams& p) noexcept {
  each_row(p.tokens.count, p.out.width, [&](int64_t t) {
    const Combined c = combined_of(p, t);
    int32_t* row = p.out.data + t * p.out.stride;
    // Ids from here on would leave int32 with the base added.
    const int64_t limit = std::clamp<int64_t>(INT32_MAX - c.base + 1, 0, p.compressed);
    const std::span<const int32_t> ids(p.topk + t * p.topk_stride, c.states);
    if (limit > 0) put_moved(ids, limit, c.base, row);
    else std::fill_n(row, c.states, -1);
    row += c.states;
    const int64_t end = c.window_row + c.tokens;  // the rows that are there: [a, b)
    const int64_t a = std::clamp(c.window_first, c.window_row, end);
    const int64_t b = std::clamp(c.window_last, a, end);
    std::fill_n(row, a - c.window_row, -1);
    if (a < b) put(a, b - a, row + (a - c.window_row));
    std::fill(row + (b - c.window_row), row + (p.out.width - c.states), -1);
    p.out.lengths[t] = static_cast<int32_t>(c.states + c.tokens);
  });
}

}  // namespace simd
}  // namespace winnow::internal::lists
#endif  // HWY_ONCE
