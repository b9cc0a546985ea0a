// Keys of a block: addresses of their records, fetching them early, and where they are packed.
// For the files compiled for one instruction set: everything here has internal linkage, so that no
// two of them share code.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include "attend/tiles.h"
#include "model/records.h"

namespace winnow::attention {
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

// Addresses of the records of a block.
inline void locate_keys(const Params& p, const Rows& rows, KeyRef* out) {
  const auto locate = [&](const ListView& list, int32_t begin, int32_t end) {
    with_latent(list.format, [&]<class R>(R) {
      for (int32_t i = begin; i < end; ++i) {
        const Entry e = rows.row[i];
        const std::byte* page = list.data + e.page * list.page_stride;
        out[i].row = page + R::row(e.offset, list.page);
        if constexpr (R::kQuantized) out[i].scales = page + R::scales(e.offset, list.page);
      }
    });
  };
  locate(p.lists[0], 0, rows.cut);
  locate(p.lists[1], rows.cut, rows.count);
}

// Fetches a record to L2.
template <class R>
[[gnu::always_inline]] inline void prefetch(const KeyRef& key) {
  const char* row = reinterpret_cast<const char*>(key.row);
#pragma GCC unroll 20
  for (int64_t b = 0; b < R::kRowBytes; b += 64) _mm_prefetch(row + b, _MM_HINT_T1);
  _mm_prefetch(row + R::kRowBytes - 1, _MM_HINT_T1);
  if constexpr (R::kQuantized && !kFloatScales<R>) _mm_prefetch(key.scales, _MM_HINT_T1);
}

// Spreads the fetching of the next block's records evenly over `steps` moments of the work on this
// one.
template <class R>
class Prefetcher {
 public:
  Prefetcher(std::span<const KeyRef> keys, int steps)
      : keys_(keys.data()), end_(keys.data() + keys.size()), steps_(steps) {}
  [[gnu::always_inline]] void step() {
    for (due_ += static_cast<int>(count_); due_ >= steps_ && keys_ < end_; due_ -= steps_)
      prefetch<R>(*keys_++);
  }

 private:
  const KeyRef *keys_, *end_;
  int64_t count_ = end_ - keys_;
  int steps_, due_ = 0;
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
  static constexpr int kCount = (R::kDqk + kPanel - 1) / kPanel;
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
}  // namespace winnow::attention
