// compress with portable vectors, parallel over tokens: all entries first, then all rows of the
// state.
//
// Budget, C4A: a token's 8 KiB (fp32 rows) are read once for the entries (the first half of its
// values by the next window, the second by its own) and once more, from a cache, for the state, and
// 8 KiB are written. An entry takes 8 x 512 exponentials. C128A: 4 KiB read and written a token,
// 128 rows of a few vectors at a time, so that the second pass over the scores finds them in L1.
#include <algorithm>
#include <cstring>

#include "compress/kernel.h"
#include "core/arithmetic.h"
#include "cpu/threads.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"
#include "cpu/write_record_simd.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::compress::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace hs = cpu::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::VFromD<D> load_values(D d, const void* data, bool are_bf16, int64_t i) {
  return are_bf16 ? hs::load_bf16(d, static_cast<const bf16*>(data) + i)
                  : hn::LoadU(d, static_cast<const float*>(data) + i);
}

template <class D>
HWY_INLINE hn::VFromD<D> load_scores(D d, const Row& row, int64_t i) {
  const auto scores = load_values(d, row.scores, row.are_bf16, i);
  return row.bias ? hn::Add(scores, hn::LoadU(d, row.bias + i)) : scores;
}

// The weighted mean of `count` rows, value by value.
void pool(const Row* rows, int count, int64_t width, float* pooled) {
  const hn::CappedTag<float, 16> d;  // divides every width: they are multiples of 16
  for (int64_t i = 0; i < width; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto largest = load_scores(d, rows[0], i);
    for (int j = 1; j < count; ++j) largest = hn::Max(largest, load_scores(d, rows[j], i));
    auto sum = hn::Zero(d);
    auto whole = hn::Zero(d);
    for (int j = 0; j < count; ++j) {
      const auto weight = hn::Exp(d, hn::Sub(load_scores(d, rows[j], i), largest));
      sum = hn::MulAdd(weight, load_values(d, rows[j].values, rows[j].are_bf16, i), sum);
      whole = hn::Add(whole, weight);
    }
    hn::StoreU(hn::Div(sum, whole), d, pooled + i);
  }
}

// False if a row is missing.
bool pool_entry(const Params& p, int64_t token, float* pooled) {
  const int64_t last = position_of(p, token);
  Row rows[kMaxRows];
  int count = 0;
  for (int64_t j = std::max<int64_t>(last - rows_of_entry(p) + 1, 0); j <= last; ++j) {
    rows[count] = row_of(p, token, last, j);
    if (rows[count++].values == nullptr) return false;
  }
  if (p.gate) {
    pool(rows, count, p.width, pooled);
    return true;
  }
  const hn::CappedTag<float, 16> d;
  for (int64_t i = 0; i < p.width; i += static_cast<int64_t>(hn::Lanes(d)))
    hn::StoreU(load_values(d, rows[0].values, rows[0].are_bf16, i), d, pooled + i);
  return true;
}

void store_entry(const Params& p, int64_t token) {
  const int64_t slot = p.cache.data ? p.slots[token * p.slot_stride] : -1;
  if (slot < 0 && p.latent == nullptr) return;
  HWY_ALIGN float pooled[kMaxWidth];
  HWY_ALIGN bf16 row[kMaxWidth];
  if (!pool_entry(p, token, pooled)) return;
  hs::norm_row(p.norm, pooled, p.width, row);
  if (p.latent) std::memcpy(p.latent + token * p.latent_stride, row, p.width * sizeof(bf16));
  if (slot < 0) return;
  if (p.rope.table) {
    const int64_t position = position_of(p, token) - p.ratio + 1;
    if (!core::in_table(p.rope, position)) return;
    core::Angles angles;
    hs::load_angles(p.rope, position, angles);
    bf16* slice = row + core::rope_begin(p.rope, p.width);
    hs::rotate_row(p.rope, angles, slice, slice);
  }
  if (p.hadamard) hs::hadamard_row(row, row);
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    using R = decltype(record);
    hs::write_record<R>(p.quantizer, row, row + R::kNope, page, slot % p.cache.page, p.cache.page);
  });
}

void store_entries(const Params& p, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t)
    if (closes(p, t)) store_entry(p, t);
}

void store_rows(const Params& p, int64_t first, int64_t last) {
  const hn::CappedTag<float, 16> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t values = values_of(p);
  for (int64_t t = first; t < last; ++t) {
    float* to = own_state_row(p, t);
    if (to == nullptr) continue;
    const int64_t from = t * p.row_stride;
    for (int64_t i = 0; i < values; i += lanes)
      hn::StoreU(load_values(d, p.rows, p.rows_are_bf16, from + i), d, to + i);
    const float* bias = nullptr;
    if (p.bias) bias = p.bias + position_of(p, t) % p.ratio * p.bias_stride;
    for (int64_t i = 0; i < values; i += lanes) {
      const auto scores = load_values(d, p.rows, p.rows_are_bf16, from + values + i);
      hn::StoreU(bias ? hn::Add(scores, hn::LoadU(d, bias + i)) : scores, d, to + values + i);
    }
  }
}

}  // namespace winnow::internal::compress::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::compress {

HWY_EXPORT(store_entries);
HWY_EXPORT(store_rows);

void simd(const Params& p) noexcept {
  constexpr int64_t kTokens = 16;  // 64 KB or more of rows: above the cost of a task
  const int64_t tasks = ceil_div(p.tokens, kTokens);
  cpu::parallel_for(tasks, [&](int64_t task, int) {
    const int64_t first = task * kTokens;
    HWY_DYNAMIC_DISPATCH(store_entries)(p, first, std::min(first + kTokens, p.tokens));
  });
  // All entries before any row: a row of the call may take the place of one that an entry needs.
  if (p.state == nullptr) return;
  cpu::parallel_for(tasks, [&](int64_t task, int) {
    const int64_t first = task * kTokens;
    HWY_DYNAMIC_DISPATCH(store_rows)(p, first, std::min(first + kTokens, p.tokens));
  });
}

}  // namespace winnow::internal::compress
#endif  // HWY_ONCE
