// write and gather, as specified.
#include <algorithm>
#include <cstring>

#include "model/records.h"
#include "write/kernel.h"

namespace winnow::internal::write::reference {

namespace {

// Token t into place `off` of a page.
template <class R>
void write_record(const Params& p, int64_t t, std::byte* page, int64_t off) {
  const bf16* kv = p.kv + t * p.kv_stride;
  std::byte* row = page + R::row(off, p.cache.page);
  if constexpr (R::kQuantized) {
    auto* codes = reinterpret_cast<e4m3*>(row);
    std::byte* scales = page + R::scales(off, p.cache.page);
    std::memset(scales, 0, R::kScaleBytes);  // V4's eighth byte stays zero
    for (int tile = 0; tile < R::kTiles; ++tile) {
      const bf16* x = kv + tile * R::kTile;
      float amax = 0;
      for (int i = 0; i < R::kTile; ++i) amax = max_magnitude(amax, to_float(x[i]));
      const float s = scale_of(p.quantizer, amax);
      put_scale(reinterpret_cast<typename R::Scale*>(scales) + tile, s);
      for (int i = 0; i < R::kTile; ++i) codes[tile * R::kTile + i] = to_e4m3(to_float(x[i]) / s);
    }
    if constexpr (R::kRope > 0)
      std::memcpy(page + R::rope(off, p.cache.page), p.rope + t * p.rope_stride, R::kRope * 2);
  } else {
    std::memcpy(row, kv, R::kNope * 2);
    std::memcpy(row + R::kNope * 2, p.rope + t * p.rope_stride, R::kRope * 2);
  }
}

// Place `off` of a page as a row of bf16.
template <class R>
void gather_record(const GatherParams& p, const std::byte* page, int64_t off, bf16* out) {
  const std::byte* row = page + R::row(off, p.cache.page);
  if constexpr (R::kQuantized) {
    const auto* codes = reinterpret_cast<const e4m3*>(row);
    const auto* scales =
        reinterpret_cast<const typename R::Scale*>(page + R::scales(off, p.cache.page));
    for (int i = 0; i < R::kNope; ++i)
      out[i] = to_bf16(to_float(codes[i]) * get_scale(scales + i / R::kTile));
    std::memcpy(out + R::kNope, page + R::rope(off, p.cache.page), R::kRope * 2);
  } else {
    std::memcpy(out, row, R::kDim * 2);
  }
}

}  // namespace

void write(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int64_t slot = p.slots[t * p.slot_stride];
    if (slot < 0) continue;
    std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
    with_record(p.cache.format, [&](auto record) {
      write_record<decltype(record)>(p, t, page, slot % p.cache.page);
    });
  }
}

void gather(const GatherParams& p) noexcept {
  int64_t before = 0;
  for (int64_t request = 0; request < p.requests; ++request) {
    const Run run = run_of(p, request, before);
    for (int64_t i = 0; i < run.count; ++i) {
      const std::byte* page = page_of(p, request, run.token + i);
      with_latent(p.cache.format, [&](auto record) {
        using R = decltype(record);
        bf16* out = p.out + (run.row + i) * p.out_stride;
        if (page) gather_record<R>(p, page, (run.token + i) % p.cache.page, out);
        else std::fill_n(out, R::kDim, bf16{0});
      });
    }
  }
}

}  // namespace winnow::internal::write::reference
