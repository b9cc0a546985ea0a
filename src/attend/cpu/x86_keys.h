// Keys of a block: addresses of their records, fetching them early, and where they are packed.
// For the files compiled for one instruction set: everything here has internal linkage, so that no
// two of them share code.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "attend/cpu/tiles.h"
#include "core/arithmetic.h"
#include "model/records.h"

namespace winnow::internal::attend::cpu {
namespace {

// Address of a record. `scales` is where a quantised record keeps its scales.
struct KeyRef {
  const std::byte* row;
  const std::byte* scales;
};

// fp32 scales of 128 dims, which must be applied to fp32 sums; ue8m0 shifts exponents instead.
template <class R>
constexpr bool kFloatScales = [] {
  if constexpr (R::kQuantized) return std::is_same_v<typename R::Scale, float>;
  else return false;
}();

// Records whose fp32 scales are powers of two, as some writers round them: those are added to the
// exponents of e4m3 values in bf16, exactly, as ue8m0 is. A block of such keys is R's with one sum
// for all dims instead of one for each scale.
template <class R>
struct Folded : R {};
template <class R>
constexpr bool kFloatScales<Folded<R>> = false;

// Whether all scales of these keys are. Sums and products are as far from either end of fp32's
// range with scales of 2^-60 to 2^60 as one can ask for. Where scales are not rounded to powers of
// two, the first key says so.
template <class R>
bool all_powers(const KeyRef* keys, int n) {
  static_assert(kFloatScales<R> && R::kScaleBytes == 16);
  const __m128i low = _mm_set1_epi32(67 << 23), range = _mm_set1_epi32(120 << 23);
  const __m128i mantissa = _mm_set1_epi32(0x7fffff);
  unsigned others = 0;
  for (int i = 0; i < n && others == 0; ++i) {
    const __m128i s = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[i].scales));
    others = _mm_cmpgt_epu32_mask(_mm_sub_epi32(s, low), range) | _mm_test_epi32_mask(s, mantissa);
  }
  return others == 0;
}

// The power of two that dims [64 g, 64 g + 64) of a key are multiplied by, as ue8m0.
template <class R>
[[gnu::always_inline]] inline int exponent_of(const KeyRef& key, int g) {
  if constexpr (sizeof(typename R::Scale) == 1) return static_cast<int>(key.scales[g]);
  uint32_t bits;
  std::memcpy(&bits, key.scales + g * 64 / R::kTile * 4, 4);
  return static_cast<int>(bits >> 23);
}

// Addresses of a list's next valid records, as many as there is room for: resolve() of eight
// entries at once. One after the other they took 10 ticks a key: 1 to 4 % of a token.
template <class R>
int32_t take_keys(const ListView& list, Cursor& cursor, Cursor::Range& left,
                  std::span<KeyRef> room) {
  const auto all = [](int64_t x) { return _mm512_set1_epi64(x); };
  const __m512i zero = _mm512_setzero_si512(), pages = all(list.pages);
  const int32_t rows = list.page, request = cursor.request();
  const int32_t* table = list.block_table;
  if (table && (request < 0 || request >= list.table_rows)) left.index = left.end;
  else if (table) table += request * list.table_stride;
  int64_t scales = 0, scale_step = 0;  // R::scales() and R::row() are linear in the offset
  if constexpr (R::kQuantized) {
    scales = R::scales(0, rows);
    scale_step = R::scales(1, rows) - scales;
  }
  const int64_t row_step = R::row(1, rows) - R::row(0, rows);
  const auto limit = static_cast<int32_t>(room.size());
  int32_t count = 0;
  while (left.index < left.end && count < limit) {
    const auto n = std::min<int64_t>({8, left.end - left.index, limit - count});
    const auto there = static_cast<__mmask8>((1u << n) - 1);
    const __m512i index = _mm512_cvtepi32_epi64(_mm256_maskz_loadu_epi32(there, left.index));
    left.index += n;
    __m512i page = _mm512_srl_epi64(_mm512_mul_epu32(index, all(list.page.factor)),
                                    _mm_cvtsi32_si128(list.page.shift));
    const __m512i offset = _mm512_sub_epi64(index, _mm512_mul_epi32(page, all(rows)));
    __mmask8 valid = _mm512_mask_cmpge_epi64_mask(there, index, zero);
    if (table) {
      valid = _mm512_mask_cmplt_epi64_mask(valid, page, all(list.table_width));
      page = _mm512_cvtepi32_epi64(
          _mm512_mask_i64gather_epi32(_mm256_setzero_si256(), valid, page, table, 4));
      valid = _mm512_mask_cmpge_epi64_mask(valid, page, zero);
    }
    valid = _mm512_mask_cmplt_epi64_mask(valid, page, pages);
    const __m512i base = _mm512_add_epi64(_mm512_mullo_epi64(page, all(list.page_stride)),
                                          all(reinterpret_cast<int64_t>(list.data)));
    const auto at = [&](int64_t first, int64_t step) {
      const __m512i x = _mm512_add_epi64(base, all(first));
      return _mm512_maskz_compress_epi64(valid,
                                         _mm512_add_epi64(x, _mm512_mul_epi32(offset, all(step))));
    };
    const __m512i row = at(R::row(0, rows), row_step), scale = at(scales, scale_step);
    const int found = __builtin_popcount(valid);
    const unsigned words = (1u << 2 * found) - 1;
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    KeyRef* to = room.data() + count;
    _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(words),
                             _mm512_permutex2var_epi64(row, low, scale));
    _mm512_mask_storeu_epi64(to + 4, static_cast<__mmask8>(words >> 8),
                             _mm512_permutex2var_epi64(row, high, scale));
    count += found;
  }
  return count;
}

// The next block of keys, those of list 0 first.
struct KeyBlock {
  int32_t count, cut;  // keys [0, cut) are of list 0, [cut, count) of list 1
};
inline KeyBlock next_keys(const Params& p, Cursor& cursor, std::span<KeyRef> room) {
  const auto take = [&](int list, std::span<KeyRef> to) {
    return with_latent(p.lists[list].format, [&]<class R>(R) {
      return take_keys<R>(p.lists[list], cursor, cursor.left(list), to);
    });
  };
  const int32_t cut = take(0, room);
  return {p.list_count > 1 ? cut + take(1, room.subspan(static_cast<size_t>(cut))) : cut, cut};
}

// Fetches a record to L2, or all the way to L1.
template <class R, bool kNear>
[[gnu::always_inline]] inline void prefetch_to(const KeyRef& key) {
  constexpr auto kHint = kNear ? _MM_HINT_T0 : _MM_HINT_T1;
  const char* row = reinterpret_cast<const char*>(key.row);
#pragma GCC unroll 20
  for (int64_t b = 0; b < R::kRowBytes; b += 64) _mm_prefetch(row + b, kHint);
  _mm_prefetch(row + R::kRowBytes - 1, kHint);
  if constexpr (R::kQuantized && !kFloatScales<R>) _mm_prefetch(key.scales, kHint);
}
template <class R>
[[gnu::always_inline]] inline void prefetch(const KeyRef& key, bool near) {
  if (near) prefetch_to<R, true>(key);
  else prefetch_to<R, false>(key);
}

// Spreads the fetching of the next block's records evenly over `steps` moments of the work on this
// one.
template <class R>
class Prefetcher {
 public:
  Prefetcher(std::span<const KeyRef> keys, int steps, bool near = false)
      : keys_(keys.data()), end_(keys.data() + keys.size()), steps_(steps), near_(near) {}
  [[gnu::always_inline]] void step() {
    for (due_ += static_cast<int>(count_); due_ >= steps_ && keys_ < end_; due_ -= steps_)
      prefetch<R>(*keys_++, near_);
  }

 private:
  const KeyRef *keys_, *end_;
  int64_t count_ = end_ - keys_;
  int steps_, due_ = 0;
  bool near_;
};

// A packed block keeps K in panels of 128 dims: what a register tile or an AMX tile reads at a time
// is one short contiguous piece. A cell is 4 bytes: `kPer` values. [panel][key][dims] for vectors:
// panels, and the groups of packed pairs, are a few lines more than a power of two apart, as a
// key's pieces in them would otherwise fall on the same sets of L1. For AMX (E::kTiled) [16
// keys][step of 32 dims][key], tiles of 1 KB, a line apart for the same reason.
inline constexpr int kPanel = 128, kPadCells = 80;
inline constexpr int kTileCells = 256, kPageCells = 4 * kTileCells;
inline constexpr int kTilePitch = kTileCells + 16;
template <class R, class E>
struct Panels {
  static constexpr int kCount = ceil_div(R::kDqk, kPanel);
  static constexpr int cells(int panel) {  // of one key
    return std::min(kPanel, R::kDqk - panel * kPanel) / E::kPer;
  }
  static constexpr int64_t kSixteen = R::kDqk / 32 * kTilePitch;  // keys, tiled
  static constexpr int64_t start(int panel) {
    return int64_t{panel} *
           (E::kTiled ? kPanel / 32 * kTilePitch : kPanel / E::kPer * E::kBlock + kPadCells);
  }
  static constexpr int64_t kTotal = E::kTiled ? E::kBlock / 16 * kSixteen : start(kCount);
  // Where dims [64 g, 64 g + 64) of a key are; tiled, the first half of them.
  static constexpr int64_t group(int key, int g) {
    if constexpr (E::kTiled) return key / 16 * kSixteen + g * 2 * kTilePitch + key % 16 * 16;
    return start(g / 2) + int64_t{key} * cells(g / 2) + g % 2 * (64 / E::kPer);
  }
  static constexpr int kHalf = E::kTiled ? kTilePitch : 16;  // to the second half
  // Where those of keys `key` (even) and key + 1 are, with the cells of the two in turn.
  static constexpr int64_t pair(int key, int g) {
    return start(g / 2) + int64_t{key} * cells(g / 2) + g % 2 * (128 / E::kPer);
  }
  // Q of 16 heads.
  static constexpr int64_t kQuery = (E::kTiled ? kCount * kPanel : R::kDqk) / E::kPer * 16;
};

// Pairs of keys for the values: [group of 64 dims][pair][4 vectors][16 cells]; tiled, 16 pairs of
// each vector together: [16 pairs][vector][pair][16 cells].
inline constexpr int kValueTiles = kValueDim / 16 * kTilePitch;  // of 16 pairs
template <class E>
inline constexpr int64_t kPairGroup = E::kTiled ? 4 * kTilePitch : E::kWaiting / 2 * 64 + kPadCells;
template <class E>
inline constexpr int64_t kPairTotal =
    E::kTiled ? E::kWaiting / 32 * kValueTiles : kValueDim / 64 * kPairGroup<E>;
template <class E>
constexpr int64_t pair_offset(int pair) {
  return E::kTiled ? pair / 16 * kValueTiles + pair % 16 * 16 : pair * 64;
}
template <class E>
inline constexpr int kPairVector = E::kTiled ? kTilePitch : 16;

}  // namespace
}  // namespace winnow::internal::attend::cpu
