// One record from one bf16 row, as specified. Nothing else of the page changes.
#pragma once

#include <cstring>

#include "core/quantizer.h"
#include "model/records.h"

namespace winnow::internal::model {

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`.
template <class R>
void write_record(const core::Quantizer& quantizer, const bf16* values, const bf16* rope,
                  std::byte* page, int64_t offset, int64_t page_size) {
  std::byte* row = page + R::row(offset, page_size);
  if constexpr (R::kQuantized) {
    auto* codes = reinterpret_cast<e4m3*>(row);
    std::byte* scales = page + R::scales(offset, page_size);
    std::memset(scales, 0, R::kScaleBytes);  // V4's eighth byte stays zero
    for (int tile = 0; tile < R::kTiles; ++tile) {
      const float s =
          core::write_tile(quantizer, values + tile * R::kTile, R::kTile, codes + tile * R::kTile);
      core::put_scale(reinterpret_cast<typename R::Scale*>(scales) + tile, s);
    }
    if constexpr (R::kRope > 0)
      std::memcpy(page + R::rope(offset, page_size), rope, R::kRope * sizeof(bf16));
  } else {
    std::memcpy(row, values, R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(row + R::kNope * sizeof(bf16), rope, R::kRope * sizeof(bf16));
  }
}

}  // namespace winnow::internal::model
