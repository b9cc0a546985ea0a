// write and gather, as specified.
#include <algorithm>
#include <cstring>

#include "model/records.h"
#include "model/write_record.h"
#include "write/kernel.h"

namespace winnow::internal::write::reference {

namespace {

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

namespace {

// Token t behind its prologue; false if its position is outside the table.
bool prepare(const Params& p, int64_t t, int64_t nope, int64_t dim, bf16* row) {
  std::copy_n(p.kv + t * p.kv_stride, nope, row);
  std::copy_n(p.rope_part + t * p.rope_stride, dim - nope, row + nope);
  norm_row(p.norm, row, p.norm_width, row);
  if (p.rope.table) {
    const int32_t position = p.positions[t * p.position_stride];
    if (!in_table(p.rope, position)) return false;
    Angles angles;
    load_angles(p.rope, position, angles);
    bf16* slice = row + rope_begin(p.rope, dim);
    rotate_row(p.rope, angles, slice, slice);
  }
  if (p.hadamard) hadamard_row(row, row);
  return true;
}

}  // namespace

void write(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int64_t slot = p.slots[t * p.slot_stride];
    if (slot < 0) continue;
    std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
    with_record(p.cache.format, [&](auto record) {
      using R = decltype(record);
      const bf16* values = p.kv + t * p.kv_stride;
      const bf16* rope = p.rope_part + t * p.rope_stride;
      bf16 row[kMaxDim];
      if (p.prologue) {
        if (!prepare(p, t, R::kNope, R::kDim, row)) return;
        values = row;
        rope = row + R::kNope;
      }
      write_record<R>(p.quantizer, values, rope, page, slot % p.cache.page, p.cache.page);
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
