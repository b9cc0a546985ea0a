// The indexer's keys: 132 B on average, split inside a page (128 e4m3 rows for all tokens, then
// fp32 scales), or 256 B of plain bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::model {

struct IndexKeys {
  static constexpr CacheFormat kFormat = CacheFormat::kIndexKeys;
  static constexpr bool kQuantized = true;
  static constexpr int kDim = 128, kNope = 128, kRope = 0;
  static constexpr int kTile = 128, kTiles = 1;
  using Scale = float;
  static constexpr int kScaleBytes = 4;
  static constexpr int64_t kRowBytes = kNope;
  static constexpr int64_t kPageAlign = 1;

  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t scales(int64_t off, int64_t page) {
    return page * kRowBytes + off * kScaleBytes;
  }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * (kRowBytes + kScaleBytes); }
};

struct IndexKeysBf16 {
  static constexpr CacheFormat kFormat = CacheFormat::kIndexKeysBf16;
  static constexpr bool kQuantized = false;
  static constexpr int kDim = 128, kNope = 128, kRope = 0;
  static constexpr int64_t kRowBytes = kDim * 2;
  static constexpr int64_t kPageAlign = 1;

  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * kRowBytes; }
};

constexpr bool is_index(CacheFormat format) {
  return format == CacheFormat::kIndexKeys || format == CacheFormat::kIndexKeysBf16;
}

}  // namespace winnow::internal::model
