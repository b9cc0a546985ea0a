// DeepSeek V3.2 (and GLM-5): 576-wide queries and keys, V = the first 512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::model {

struct V32 {
  static constexpr int kDqk = 576, kDv = 512, kNope = 512, kRope = 64;
};

// 656 B, all inside the token: 512 e4m3 | 4 fp32 scales | 64 bf16 RoPE.
struct V32Fp8 : V32 {
  static constexpr CacheFormat kFormat = CacheFormat::kV32Fp8;
  static constexpr bool kQuantized = true;
  static constexpr int kDim = kDqk;
  static constexpr int kTile = 128, kTiles = kNope / kTile;
  using Scale = float;  // as stored
  static constexpr int kScaleBytes = kTiles * 4;
  static constexpr int64_t kRowBytes = kNope + kScaleBytes + kRope * 2;
  static constexpr int64_t kPageAlign = 1;

  // Byte offsets inside a page of `page` tokens.
  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t scales(int64_t off, int64_t) {
    return off * kRowBytes + kNope;
  }
  WINNOW_HD static constexpr int64_t rope(int64_t off, int64_t) {
    return off * kRowBytes + kNope + kScaleBytes;
  }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * kRowBytes; }
};
static_assert(V32Fp8::kRowBytes == 656);

// 576 bf16.
struct V32Bf16 : V32 {
  static constexpr CacheFormat kFormat = CacheFormat::kV32Bf16;
  static constexpr bool kQuantized = false;
  static constexpr int kDim = kDqk;
  static constexpr int64_t kRowBytes = kDim * 2;
  static constexpr int64_t kPageAlign = 1;
  WINNOW_HD static constexpr int64_t row(int64_t off, int64_t) { return off * kRowBytes; }
  WINNOW_HD static constexpr int64_t used(int64_t page) { return page * kRowBytes; }
};

}  // namespace winnow::internal::model
