// DeepSeek V4: 512-wide queries, keys and values (RoPE included in V).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::model {

struct V4 {
  static constexpr int kDqk = 512, kDv = 512, kNope = 448, kRope = 64;
};

// 584 B on average, split inside a page: rows of 448 e4m3 | 64 bf16 RoPE (576 B) for all tokens,
// then 8 B of scales per token (seven ue8m0, one zero byte). The page is padded to a multiple of
// 576.
struct V4Fp8 : V4 {
  static constexpr CacheFormat kFormat = CacheFormat::kV4Fp8;
  static constexpr bool kQuantized = true;
  static constexpr int kDim = kDqk;
  static constexpr int kTile = 64, kTiles = kNope / kTile;
  using Scale = uint8_t;  // ue8m0, as stored
  static constexpr int kScaleBytes = 8;
  static constexpr int64_t kRowBytes = kNope + kRope * 2;
  static constexpr int64_t kPageAlign = kRowBytes;

  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t scales(int64_t off, int64_t page) {
    return page * kRowBytes + off * kScaleBytes;
  }
  WINNOW_HD static constexpr int64_t rope(int64_t off, int64_t) { return off * kRowBytes + kNope; }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * (kRowBytes + kScaleBytes); }
};
static_assert(V4Fp8::kRowBytes == 576);

// 512 bf16.
struct V4Bf16 : V4 {
  static constexpr CacheFormat kFormat = CacheFormat::kV4Bf16;
  static constexpr bool kQuantized = false;
  static constexpr int kDim = kDqk;
  static constexpr int64_t kRowBytes = kDim * 2;
  static constexpr int64_t kPageAlign = 1;
  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * kRowBytes; }
};

}  // namespace winnow::internal::model
