// One record from one bf16 row in Highway vectors, byte for byte as model/write_record.h has it.
// Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_WRITE_RECORD_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_WRITE_RECORD_SIMD_H
#undef WINNOW_CPU_WRITE_RECORD_SIMD_H
#else
#define WINNOW_CPU_WRITE_RECORD_SIMD_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/quantizer.h"
#include "cpu/codes_simd.h"
#include "cpu/stream_simd.h"
#include "hwy/highway.h"
#include "model/records.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Where a record goes: its row, and its scales, which are part of the row or stand by themselves.
template <class R>
struct RecordPlace {
  RecordPlace(std::byte* record, std::byte* scales_of) : row(record), scales(scales_of) {}
  RecordPlace(std::byte* page, int64_t offset, int64_t page_size)
      : row(page + R::row(offset, page_size)) {
    if constexpr (R::kQuantized) scales = page + R::scales(offset, page_size);
  }
  std::byte* row;
  std::byte* scales = nullptr;
};

// Asks for the lines of a record that will be written.
template <class R>
HWY_INLINE void prefetch_record(const RecordPlace<R>& to) {
  for (int64_t at = 0; at < R::kRowBytes; at += kLine) __builtin_prefetch(to.row + at, 1);
  if constexpr (R::kQuantized) __builtin_prefetch(to.scales, 1);
}

// The plans of a record's tiles, whose values stand at `values`.
template <class R>
HWY_INLINE void plan_record(const TileQuantizer& quantizer, const bf16* values, TilePlans& plans) {
  if constexpr (!R::kQuantized) return;
  else if constexpr (R::kTiles == 1) {
    plans.most[0] = largest_magnitude<R::kTile>(values);
    plan_tile(quantizer, plans);
  } else {
    const auto tile = [&](int i) WINNOW_INLINED { return values + i * R::kTile; };
    largest_magnitudes<R::kTile, R::kTiles>(tile, plans);
    plan_tiles<R::kTiles>(quantizer, plans);
  }
}

// Values [0, R::kNope) stand at `values`, the RoPE part (formats that have one) at `rope`. The
// plans of its tiles begin with the one at `first`.
template <class R, Order kOrder>
HWY_INLINE void write_record(const TileQuantizer& quantizer, TilePlans& plans, int first,
                             const bf16* values, const bf16* rope, const RecordPlace<R>& to) {
  if constexpr (R::kQuantized) {
    std::memset(to.scales, 0, R::kScaleBytes);
    write_planned<R::kTile, R::kTiles, kOrder>(quantizer, plans, first, values,
                                               reinterpret_cast<uint8_t*>(to.row));
    for (int i = 0; i < R::kTiles; ++i)
      core::put_scale(reinterpret_cast<typename R::Scale*>(to.scales) + i, plans.scale[first + i]);
    if constexpr (R::kRope > 0) std::memcpy(to.row + R::rope(0, 1), rope, R::kRope * sizeof(bf16));
  } else {
    std::memcpy(to.row, values, R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(to.row + R::kNope * sizeof(bf16), rope, R::kRope * sizeof(bf16));
  }
}

// Whether so many records of a call go past the caches: their whole lines do.
template <class R>
bool past_caches(const core::Pages& pages, int64_t records) {
  const int64_t lines = R::kRowBytes % kLine == 0 ? kLine : kEdge;
  return is_long(records * R::kRowBytes) && pages.stride % lines == 0 &&
         reinterpret_cast<uintptr_t>(pages.data) % lines == 0;
}

// Asks for the lines of a record past the caches that are written in part.
template <class R>
HWY_INLINE void prefetch_edges(const RecordPlace<R>& to) {
  if constexpr (R::kRowBytes % kLine != 0) {
    __builtin_prefetch(to.row, 1);
    __builtin_prefetch(to.row + R::kRowBytes - 1, 1);
  } else if constexpr (R::kQuantized) {
    __builtin_prefetch(to.scales, 1);
  }
}

// The same with the row's whole lines past the caches. FlushStream() belongs behind the last
// record.
template <class R, Order kOrder>
HWY_INLINE void stream_record(const TileQuantizer& quantizer, TilePlans& plans, int first,
                              const bf16* values, const bf16* rope, const RecordPlace<R>& to) {
  if constexpr (R::kQuantized) {
    alignas(kLine) std::byte row[R::kRowBytes];
    RecordPlace<R> here = to;
    here.row = row;
    if constexpr (R::scales(0, 1) < R::kRowBytes) here.scales = row + R::scales(0, 1);
    write_record<R, kOrder>(quantizer, plans, first, values, rope, here);
    if constexpr (R::kRowBytes % kLine == 0) stream_lines(row, R::kRowBytes, to.row);
    else stream_row(row, R::kRowBytes, to.row);
  } else {
    stream_lines(values, R::kNope * sizeof(bf16), to.row);
    stream_lines(rope, R::kRope * sizeof(bf16), to.row + R::kNope * sizeof(bf16));
  }
}

// A record of values in turn.
template <class R>
HWY_INLINE void write_record(const TileQuantizer& quantizer, bool stream, const bf16* values,
                             const bf16* rope, const RecordPlace<R>& to) {
  TilePlans plans;
  plan_record<R>(quantizer, values, plans);
  if (stream) stream_record<R, Order::kInTurn>(quantizer, plans, 0, values, rope, to);
  else write_record<R, Order::kInTurn>(quantizer, plans, 0, values, rope, to);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
