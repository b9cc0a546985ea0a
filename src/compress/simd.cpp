// compress with portable vectors, parallel over tokens: first the entries that take rows of the
// state, then all others, each block of them together with its rows of the state.
//
// Budget, C4A: a token's 8 KiB (fp32 rows) are read once for the entries (the first half of its
// values by the next window, the second by its own) and once more, from a cache, for the state, and
// 8 KiB are written. An entry takes 8 x 512 exponentials. C128A: 4 KiB read and written a token. An
// entry's 128 rows, 4 KiB apart, would all fall into one set of L1 if columns were taken one after
// the other: they are taken in groups of eight.
#include <algorithm>
#include <cstring>
#include <limits>

#include "compress/kernel.h"
#include "core/arithmetic.h"
#include "cpu/threads.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compress/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"
#include "cpu/stream_simd.h"
#include "cpu/write_record_simd.h"

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

constexpr int64_t kEntries = 8;  // that go through each step together

// exp(x) for x <= 0, off by 2 units in the last place at most; 0 below -87; NaN for NaN, if the low
// nine bits are zeros, as those of bf16 and of arithmetic are. 2^n e^r: adding 1.5 * 2^23 rounds
// x / ln 2 to n, which then stands in the low bits; e^r by a polynomial whose own error is 0.06
// units.
template <class D>
HWY_INLINE hn::VFromD<D> exp_below_zero(D d, hn::VFromD<D> x) {
  const hn::RebindToUnsigned<D> du;
  const auto magic = hn::Set(d, 0x1.8p23f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  // ln 2 in two parts: n times the first is exact.
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  const auto r2 = hn::Mul(r, r);
  const auto low = hn::MulAdd(r, hn::Set(d, 0.166665152f), hn::Set(d, 0.49999994f));
  const auto middle = hn::MulAdd(r, hn::Set(d, 0.00836941879f), hn::Set(d, 0.0416684560f));
  const auto high = hn::MulAdd(r2, hn::Set(d, 0.00138131448f), middle);
  const auto power = hn::Add(hn::MulAdd(r2, hn::MulAdd(r2, high, low), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  const auto y = hn::BitCast(d, hn::Add(hn::BitCast(du, power), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), y);
}

// Sums so far of the weighted values and of the weights, relative to the largest score so far.
template <class V>
struct Pool {
  V largest, weighted_sum, weight_sum;
};

// Takes kGroup rows, whose scores stay in registers, into vector i of an entry. kFloats: all of
// them are fp32.
template <int kGroup, bool kFloats, class D>
HWY_INLINE void pool_group(D d, const Row* rows, int64_t i, Pool<hn::VFromD<D>>& pool) {
  hn::VFromD<D> scores[kGroup];
  auto largest = pool.largest;
  for (int j = 0; j < kGroup; ++j) {
    Row row = rows[j];
    if constexpr (kFloats) row.are_bf16 = false;
    scores[j] = load_scores(d, row, i);
    largest = hn::Max(largest, scores[j]);
  }
  const auto factor = exp_below_zero(d, hn::Sub(pool.largest, largest));
  auto weighted_sum = hn::Mul(pool.weighted_sum, factor);
  auto weight_sum = hn::Mul(pool.weight_sum, factor);
  for (int j = 0; j < kGroup; ++j) {
    const auto weight = exp_below_zero(d, hn::Sub(scores[j], largest));
    const bool are_bf16 = !kFloats && rows[j].are_bf16;
    weighted_sum = hn::MulAdd(weight, load_values(d, rows[j].values, are_bf16, i), weighted_sum);
    weight_sum = hn::Add(weight_sum, weight);
  }
  pool = {largest, weighted_sum, weight_sum};
}

// The weighted mean of an entry's rows, value by value. Rows are read once, a group of them at a
// time: the sums are scaled down where a group has a larger score. `pooled` holds the weighted sums
// until the last group.
template <int kGroup, bool kFloats>
HWY_NOINLINE void pool_rows(const Row* rows, int count, int64_t width, float* pooled) {
  const hn::CappedTag<float, 16> d;  // divides every width: they are multiples of 16
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN float largest[kMaxWidth];
  HWY_ALIGN float weight_sum[kMaxWidth];
  for (int first = 0; first < count; first += kGroup)
    for (int64_t i = 0; i < width; i += lanes) {
      Pool<hn::VFromD<decltype(d)>> pool{hn::Set(d, std::numeric_limits<float>::lowest()),
                                         hn::Zero(d), hn::Zero(d)};
      if (first > 0)
        pool = {hn::Load(d, largest + i), hn::LoadU(d, pooled + i), hn::Load(d, weight_sum + i)};
      pool_group<kGroup, kFloats>(d, rows + first, i, pool);
      if (first + kGroup == count) {
        hn::StoreU(hn::Div(pool.weighted_sum, pool.weight_sum), d, pooled + i);
      } else {
        hn::Store(pool.largest, d, largest + i);
        hn::StoreU(pool.weighted_sum, d, pooled + i);
        hn::Store(pool.weight_sum, d, weight_sum + i);
      }
    }
}

template <bool kFloats>
HWY_INLINE void pool_rows(const Row* rows, int count, int64_t width, float* pooled) {
  if (count % 8 == 0) pool_rows<8, kFloats>(rows, count, width, pooled);
  else if (count % 4 == 0) pool_rows<4, kFloats>(rows, count, width, pooled);
  else if (count % 2 == 0) pool_rows<2, kFloats>(rows, count, width, pooled);
  else pool_rows<1, kFloats>(rows, count, width, pooled);
}

// Where the entry's values are, before the norm: in `pooled`, or in the only row, as it is given.
// Null if a row is missing.
const void* pool_entry(const Params& p, int64_t token, Row* rows, float* pooled) {
  const int64_t last = position_of(p, token);
  int count = 0;
  bool floats = true;
  for (int64_t j = std::max<int64_t>(last - rows_of_entry(p) + 1, 0); j <= last; ++j) {
    rows[count] = row_of(p, token, last, j);
    floats = floats && !rows[count].are_bf16;
    if (rows[count++].values == nullptr) return nullptr;
  }
  if (!p.gate) return rows[0].values;
  if (floats) pool_rows<true>(rows, count, p.width, pooled);
  else pool_rows<false>(rows, count, p.width, pooled);
  return pooled;
}

// Entries of the tokens that close them.
struct Entries {
  int64_t count = 0;
  int64_t tokens[kEntries];
  int64_t slots[kEntries];  // negative: the latent alone
  const void* values[kEntries];
  Row window[kMaxRows];  // of the entry at hand: made once, since all of it is zeroed
  HWY_ALIGN float pooled[kEntries * kMaxWidth];
  HWY_ALIGN bf16 rows[kEntries * kMaxWidth];
};

void prefetch_entry(const Params& p, int64_t slot) {
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    using R = decltype(record);
    const hs::RecordPlace<R> to(page, slot % p.cache.page, p.cache.page);
    if (!hs::past_caches<R>(p.cache, p.tokens / p.ratio)) hs::prefetch_record<R>(to);
    else if (R::kQuantized) __builtin_prefetch(to.scales, 1);
  });
}

void store_record(const Params& p, const hs::TileQuantizer& quantizer, const bf16* row,
                  int64_t slot) {
  std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
  with_entry(p.cache.format, [&](auto record) {
    using R = decltype(record);
    const hs::RecordPlace<R> to(page, slot % p.cache.page, p.cache.page);
    const bool stream = hs::past_caches<R>(p.cache, p.tokens / p.ratio);
    hs::write_record<R>(quantizer, stream, row, row + R::kNope, to);
  });
}

// Requests the row of a token that is an entry by itself, for L2, and its angles.
HWY_INLINE void prefetch_token(const Params& p, int64_t token) {
  constexpr int64_t kLine = 64;
  if (token >= p.tokens) return;
  const int64_t size = p.rows_are_bf16 ? 2 : 4;
  const std::byte* row = static_cast<const std::byte*>(p.rows) + token * p.row_stride * size;
  for (int64_t at = 0; at < p.width * size; at += kLine) __builtin_prefetch(row + at, 0, 2);
  const int64_t position = position_of(p, token);
  if (p.rope.table && core::in_table(p.rope, position))
    hs::prefetch_angles(p.rope, angles_row(p.rope, position));
}

// The sums of a Hadamard rotation could tell what was flushed.
hs::Coded coded_of(const Params& p) {
  if (p.latent != nullptr || p.hadamard || p.cache.data == nullptr) return {};
  return with_entry(p.cache.format,
                    [&](auto record) { return hs::coded_of<decltype(record)>(p.rope, true); });
}

// The norm of entries whose values are T.
template <class T>
HWY_INLINE void norm_entries(const Params& p, const hs::RowNorm& norm, Entries& e) {
  static_assert(kEntries == hs::RowNorm::kGroup);
  const auto values = [&](int64_t r) HWY_ATTR { return static_cast<const T*>(e.values[r]); };
  hs::RowNorm::Factors factors[kEntries];
  norm.factors(e.count, values, factors);
  const hs::Coded coded = coded_of(p);
  for (int64_t r = 0; r < e.count; ++r) {
    if (!p.gate) prefetch_token(p, e.tokens[r] + kEntries);
    norm.finish(factors[r], values(r), e.rows + r * kMaxWidth, coded);
  }
}

// Pooled entries, step by step over all of them: one alone would wait for its sums, and then for
// what the step before stored.
void finish_entries(const Params& p, const hs::RowNorm& norm, Entries& e) {
  const auto row = [&](int64_t r) { return e.rows + r * kMaxWidth; };
  if (!p.gate && p.rows_are_bf16) norm_entries<bf16>(p, norm, e);
  else norm_entries<float>(p, norm, e);
  if (p.latent)
    for (int64_t r = 0; r < e.count; ++r)
      std::memcpy(p.latent + e.tokens[r] * p.latent_stride, row(r), p.width * sizeof(bf16));
  const hs::Rounding rounding = hs::rounding_of(false);
  if (p.rope.table)
    for (int64_t r = 0; r < e.count; ++r) {
      const int64_t position = position_of(p, e.tokens[r]) - p.ratio + 1;
      bf16* slice = row(r) + core::rope_begin(p.rope, p.width);
      if (core::in_table(p.rope, position))
        hs::rotate_at(p.rope, angles_row(p.rope, position), rounding, slice, slice);
      else e.slots[r] = -1;
    }
  if (p.hadamard)
    for (int64_t r = 0; r < e.count; ++r) hs::hadamard_row(row(r), row(r));
  const hs::TileQuantizer quantizer(p.quantizer);
  for (int64_t r = 0; r < e.count; ++r)
    if (e.slots[r] >= 0) store_record(p, quantizer, row(r), e.slots[r]);
  e.count = 0;
}

// Whether the call has all rows of the entry that the token closes.
bool within_call(const Params& p, int64_t token) {
  const int64_t last = position_of(p, token);
  for (int64_t j = std::max<int64_t>(last - rows_of_entry(p) + 1, 0); j < last; ++j)
    if (!is_neighbour(p, token, token - (last - j), j)) return false;
  return true;
}

// Entries of the tokens [first, last): those within the call, or the others.
void store_entries(const Params& p, int64_t first, int64_t last, bool within) {
  const hs::RowNorm norm(p.norm, p.width);
  Entries entries;
  for (int64_t t = first; t < last; ++t) {
    if (!closes(p, t) || within_call(p, t) != within) continue;
    const int64_t slot = p.cache.data ? p.slots[t * p.slot_stride] : -1;
    if (slot < 0 && p.latent == nullptr) continue;
    if (slot >= 0) prefetch_entry(p, slot);
    float* pooled = entries.pooled + entries.count * kMaxWidth;
    const void* values = pool_entry(p, t, entries.window, pooled);
    if (values == nullptr) continue;
    entries.tokens[entries.count] = t;
    entries.values[entries.count] = values;
    entries.slots[entries.count++] = slot;
    if (entries.count == kEntries) finish_entries(p, norm, entries);
  }
  finish_entries(p, norm, entries);
  hwy::FlushStream();
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
  // worker has some of them, else 64 KB or more, above the cost of a task. Without a state longer
  // ones, since nothing has requested a task's first rows.
  const int64_t longest = p.state == nullptr ? 512 : std::max<int64_t>(p.ratio, 16);
  const int64_t block = std::clamp<int64_t>(p.tokens / (4 * cpu::threads()), 16, longest);
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
    if (p.state != nullptr) HWY_DYNAMIC_DISPATCH(store_rows)(p, first, last);
    HWY_DYNAMIC_DISPATCH(store_entries)(p, first, last, true);
  });
}

}  // namespace winnow::internal::compress
#endif  // HWY_ONCE
