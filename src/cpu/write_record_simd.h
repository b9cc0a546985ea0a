// One record from one bf16 row in Highway vectors, byte for byte as model/write_record.h has it.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_WRITE_RECORD_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_WRITE_RECORD_SIMD_H
#undef WINNOW_CPU_WRITE_RECORD_SIMD_H
#else
#define WINNOW_CPU_WRITE_RECORD_SIMD_H
#endif

#include <cstring>

#include "core/quantizer.h"
#include "cpu/formats_simd.h"
#include "hwy/highway.h"
#include "model/records.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Finds the scale of one tile and encodes it.
template <int kTile>
HWY_INLINE float write_tile(const core::Quantizer& q, const bf16* x, uint8_t* codes) {
  const hn::CappedTag<float, kTile> df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  auto amax = hn::Zero(df);
  for (int i = 0; i < kTile; i += lanes) amax = max_magnitude(df, amax, load_bf16(df, x + i));
  const float s = core::scale_of(q, hn::GetLane(hn::MaxOfLanes(df, amax)));
  if (q.power_of_two) {  // x / s = x * (1 / s) exactly
    const auto factor = hn::Set(df, 1 / s);
    for (int i = 0; i < kTile; i += lanes)
      store_e4m3(df, hn::Mul(load_bf16(df, x + i), factor), codes + i);
  } else {
    const auto scale = hn::Set(df, s);
    for (int i = 0; i < kTile; i += lanes)
      store_e4m3(df, hn::Div(load_bf16(df, x + i), scale), codes + i);
  }
  return s;
}

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`.
template <class R>
HWY_INLINE void write_record(const core::Quantizer& quantizer, const bf16* values, const bf16* rope,
                             std::byte* page, int64_t offset, int64_t page_size) {
  std::byte* row = page + R::row(offset, page_size);
  if constexpr (R::kQuantized) {
    std::byte* scales = page + R::scales(offset, page_size);
    std::memset(scales, 0, R::kScaleBytes);
    for (int tile = 0; tile < R::kTiles; ++tile)
      core::put_scale(reinterpret_cast<typename R::Scale*>(scales) + tile,
                      write_tile<R::kTile>(quantizer, values + tile * R::kTile,
                                           reinterpret_cast<uint8_t*>(row) + tile * R::kTile));
    if constexpr (R::kRope > 0)
      std::memcpy(page + R::rope(offset, page_size), rope, R::kRope * sizeof(bf16));
  } else {
    std::memcpy(row, values, R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(row + R::kNope * sizeof(bf16), rope, R::kRope * sizeof(bf16));
  }
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
