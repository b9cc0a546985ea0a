// compress with portable vectors, parallel over tokens: first the entries that take rows of the
// state, then all others, each block of them together with its rows of the state.
//
// Budget, C4A: a token's 8 KiB (fp32 rows) are read once for the entries (the first half of its
// values by the next window, the second by its own) and once more, from a cache, for the state, and
// 8 KiB are written. An entry takes 8 x 512 exponentials. C128A: 4 KiB read and written a token. An
// entry's 128 rows, 4 KiB apart, would all fall into one set of L1 if columns were taken one after
// the other: rows are taken whole, twice, the second time from L2.
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
#include "hwy/cache_control.h"
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

constexpr int kMaxColumnRows = 8;  // of an entry whose columns stay in registers
constexpr int64_t kEntries = 8;    // that go through each step together

// The weighted mean of a few rows, value by value.
void pool_columns(const Row* rows, int count, int64_t width, float* pooled) {
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

// Asks for a row, whose two halves lie in a page of their own each time.
constexpr int kAhead = 4;
HWY_INLINE void prefetch_row(const Row& row, int64_t width) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = width * (row.are_bf16 ? 2 : 4);
  for (const void* half : {row.scores, row.values})
    for (int64_t at = 0; at < bytes; at += kLine)
      __builtin_prefetch(static_cast<const std::byte*>(half) + at);
}

// The same of many rows, row by row; `pooled` holds the sums meanwhile.
void pool_rows(const Row* rows, int count, int64_t width, float* pooled) {
  const hn::CappedTag<float, 16> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN float largest[kMaxWidth];
  HWY_ALIGN float whole[kMaxWidth];
  for (int64_t i = 0; i < width; i += lanes) {
    hn::Store(load_scores(d, rows[0], i), d, largest + i);
    hn::Store(hn::Zero(d), d, whole + i);
    hn::StoreU(hn::Zero(d), d, pooled + i);
  }
  for (int j = 1; j < count; ++j) {
    if (j + kAhead < count) prefetch_row(rows[j + kAhead], width);
    for (int64_t i = 0; i < width; i += lanes)
      hn::Store(hn::Max(hn::Load(d, largest + i), load_scores(d, rows[j], i)), d, largest + i);
  }
  for (int j = 0; j < count; ++j)
    for (int64_t i = 0; i < width; i += lanes) {
      const auto score = load_scores(d, rows[j], i);
      const auto weight = hn::Exp(d, hn::Sub(score, hn::Load(d, largest + i)));
      const auto value = load_values(d, rows[j].values, rows[j].are_bf16, i);
      hn::StoreU(hn::MulAdd(weight, value, hn::LoadU(d, pooled + i)), d, pooled + i);
      hn::Store(hn::Add(hn::Load(d, whole + i), weight), d, whole + i);
    }
  for (int64_t i = 0; i < width; i += lanes)
    hn::StoreU(hn::Div(hn::LoadU(d, pooled + i), hn::Load(d, whole + i)), d, pooled + i);
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
  if (p.gate && count > kMaxColumnRows) {
    pool_rows(rows, count, p.width, pooled);
  } else if (p.gate) {
    pool_columns(rows, count, p.width, pooled);
  } else if (rows[0].are_bf16) {
    const hn::CappedTag<float, 16> d;
    for (int64_t i = 0; i < p.width; i += static_cast<int64_t>(hn::Lanes(d)))
      hn::StoreU(load_values(d, rows[0].values, true, i), d, pooled + i);
  } else {
    std::memcpy(pooled, rows[0].values, p.width * sizeof(float));
  }
  return true;
}

// Entries of the tokens that close them.
struct Entries {
  int64_t count = 0;
  int64_t tokens[kEntries];
  int64_t slots[kEntries];  // negative: the latent alone
  HWY_ALIGN float pooled[kEntries * kMaxWidth];
  HWY_ALIGN bf16 rows[kEntries * kMaxWidth];
};

void store_record(const Params& p, const bf16* row, int64_t slot) {
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    using R = decltype(record);
    hs::write_record<R>(p.quantizer, row, row + R::kNope, page, slot % p.cache.page, p.cache.page);
  });
}

// Pooled entries, step by step over all of them: one alone would wait for its sums, and then for
// what the step before stored.
void finish_entries(const Params& p, Entries& e) {
  const auto row = [&](int64_t r) { return e.rows + r * kMaxWidth; };
  const auto pooled = [&](int64_t r) { return e.pooled + r * kMaxWidth; };
  if (p.norm.kind == NormKind::kNone) {
    for (int64_t r = 0; r < e.count; ++r) hs::norm_row(p.norm, pooled(r), p.width, row(r));
  } else {
    hs::NormFactors factors[kEntries];
    for (int64_t r = 0; r < e.count; ++r) factors[r] = hs::norm_factors(p.norm, pooled(r), p.width);
    for (int64_t r = 0; r < e.count; ++r)
      hs::finish_norm(p.norm, factors[r], pooled(r), p.width, row(r));
  }
  if (p.latent)
    for (int64_t r = 0; r < e.count; ++r)
      std::memcpy(p.latent + e.tokens[r] * p.latent_stride, row(r), p.width * sizeof(bf16));
  if (p.rope.table)
    for (int64_t r = 0; r < e.count; ++r) {
      const int64_t position = position_of(p, e.tokens[r]) - p.ratio + 1;
      bf16* slice = row(r) + core::rope_begin(p.rope, p.width);
      if (core::in_table(p.rope, position)) hs::rotate_at(p.rope, position, slice, slice);
      else e.slots[r] = -1;
    }
  if (p.hadamard)
    for (int64_t r = 0; r < e.count; ++r) hs::hadamard_row(row(r), row(r));
  for (int64_t r = 0; r < e.count; ++r)
    if (e.slots[r] >= 0) store_record(p, row(r), e.slots[r]);
  e.count = 0;
}

// Whether the call has all rows of the entry that the token closes.
bool within_call(const Params& p, int64_t token) {
  const int64_t last = position_of(p, token);
  for (int64_t j = std::max<int64_t>(last - rows_of_entry(p) + 1, 0); j < last; ++j)
    if (!is_neighbour(p, token, token - (last - j), j)) return false;
  return true;
}

// Asks for the row of a token behind, which is an entry by itself.
void prefetch_next(const Params& p, int64_t token) {
  if (token >= p.tokens) return;
  Row row;
  row.are_bf16 = p.rows_are_bf16;
  const int64_t at = token * p.row_stride * (p.rows_are_bf16 ? 2 : 4);
  row.values = row.scores = static_cast<const std::byte*>(p.rows) + at;
  prefetch_row(row, p.width);
}

// Entries of the tokens [first, last): those within the call, or the others.
void store_entries(const Params& p, int64_t first, int64_t last, bool within) {
  Entries entries;
  for (int64_t t = first; t < last; ++t) {
    if (!closes(p, t) || within_call(p, t) != within) continue;
    const int64_t slot = p.cache.data ? p.slots[t * p.slot_stride] : -1;
    if (slot < 0 && p.latent == nullptr) continue;
    if (!p.gate) prefetch_next(p, t + kEntries);
    if (!pool_entry(p, t, entries.pooled + entries.count * kMaxWidth)) continue;
    entries.tokens[entries.count] = t;
    entries.slots[entries.count++] = slot;
    if (entries.count == kEntries) finish_entries(p, entries);
  }
  finish_entries(p, entries);
}

// Rows of the state. Of a long call few are read again soon: past the caches, they need not be read
// before they are written.
template <bool kPastCaches>
HWY_INLINE void store_rows_as(const Params& p, int64_t first, int64_t last) {
  const hn::CappedTag<float, 16> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t values = values_of(p);
  const auto store = [&](auto v, float* to) HWY_ATTR {
    if constexpr (kPastCaches) hn::Stream(v, d, to);
    else hn::StoreU(v, d, to);
  };
  for (int64_t t = first; t < last; ++t) {
    float* to = own_state_row(p, t);
    if (to == nullptr) continue;
    const int64_t from = t * p.row_stride;
    for (int64_t i = 0; i < values; i += lanes)
      store(load_values(d, p.rows, p.rows_are_bf16, from + i), to + i);
    const float* bias = nullptr;
    if (p.bias) bias = p.bias + position_of(p, t) % p.ratio * p.bias_stride;
    for (int64_t i = 0; i < values; i += lanes) {
      const auto scores = load_values(d, p.rows, p.rows_are_bf16, from + values + i);
      store(bias ? hn::Add(scores, hn::LoadU(d, bias + i)) : scores, to + values + i);
    }
  }
  if constexpr (kPastCaches) hwy::FlushStream();
}

void store_rows(const Params& p, int64_t first, int64_t last) {
  constexpr int64_t kLine = 64;
  constexpr int64_t kLong = int64_t{4} << 20;  // bytes of state: more than L2 holds
  const int64_t row_bytes = 2 * values_of(p) * static_cast<int64_t>(sizeof(float));
  const bool aligned = reinterpret_cast<uintptr_t>(p.state) % kLine == 0 &&
                       p.block_stride * sizeof(float) % kLine == 0 &&
                       p.state_stride * sizeof(float) % kLine == 0;
  if (aligned && p.tokens * row_bytes >= kLong) store_rows_as<true>(p, first, last);
  else store_rows_as<false>(p, first, last);
}

}  // namespace winnow::internal::compress::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::compress {

HWY_EXPORT(store_entries);
HWY_EXPORT(store_rows);

void simd(const Params& p) noexcept {
  // Of a block's rows the entries and the state both read: an entry's whole window where every
  // worker has some of them, else 64 KB or more, above the cost of a task.
  const int64_t block =
      std::clamp<int64_t>(p.tokens / (4 * cpu::threads()), 16, std::max<int64_t>(p.ratio, 16));
  const int64_t tasks = ceil_div(p.tokens, block);
  const auto in_blocks = [&](auto&& body) {
    cpu::parallel_for(tasks, [&](int64_t task, int) {
      body(task * block, std::min((task + 1) * block, p.tokens));
    });
  };
  // Entries that take rows of the state come before any row is stored: a row of the call may take
  // the place of one that they need.
  if (p.state != nullptr)
    in_blocks([&](int64_t first, int64_t last) {
      HWY_DYNAMIC_DISPATCH(store_entries)(p, first, last, false);
    });
  in_blocks([&](int64_t first, int64_t last) {
    HWY_DYNAMIC_DISPATCH(store_entries)(p, first, last, true);
    if (p.state != nullptr) HWY_DYNAMIC_DISPATCH(store_rows)(p, first, last);
  });
}

}  // namespace winnow::internal::compress
#endif  // HWY_ONCE
