// A cache record as fp32 values, one at a time: what the reference reads, and what the vector
// kernels fall back to for records that their fast path does not cover.
#include "attend/kernel.h"
#include "core/formats.h"
#include "model/records.h"

namespace winnow::internal::attend {

void dequantize(const ListView& list, const Entry& e, float* out) noexcept {
  const std::byte* page = list.data + e.page * list.page_stride;
  with_latent(list.format, [&](auto record) {
    using R = decltype(record);
    if constexpr (R::kQuantized) {
      const auto* q = reinterpret_cast<const e4m3*>(page + R::row(e.offset, list.page));
      const auto* scales =
          reinterpret_cast<const typename R::Scale*>(page + R::scales(e.offset, list.page));
      for (int i = 0; i < R::kNope; ++i) {
        if constexpr (sizeof(typename R::Scale) == 1)
          out[i] = to_float(q[i]) * from_ue8m0(scales[i / R::kTile]);
        else out[i] = to_float(q[i]) * scales[i / R::kTile];
      }
      const auto* rope = reinterpret_cast<const bf16*>(page + R::rope(e.offset, list.page));
      for (int i = 0; i < R::kRope; ++i) out[R::kNope + i] = to_float(rope[i]);
    } else {
      const auto* row = reinterpret_cast<const bf16*>(page + R::row(e.offset, list.page));
      for (int i = 0; i < R::kDim; ++i) out[i] = to_float(row[i]);
    }
  });
}

}  // namespace winnow::internal::attend
