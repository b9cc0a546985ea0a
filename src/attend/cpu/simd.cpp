// attend with portable vectors, fp32. Per tile: take 64 valid records at a time, dequantise each
// once for all heads, S = K Q^T, online softmax, O += P V.
//
// Layout. Keys are rows of fp32 and serve both products (products-inl.h) as they are; queries are
// transposed once per token, so that S has a row per key and a lane per head.
//
// Budget, AVX-512, per d or key step of an 8 x 2 tile: 16 FMA, 2 vector loads, 8 broadcasts; loads
// take 5 cycles, FMA 16 (one port) or 8 (two). Key chunk of 64 x 64 (16 KB) + query chunk (8 KB)
// stay in L1; all scratch for 128 heads (480 KB) and O (264 KB) in L2.
#include <cmath>
#include <cstring>

#include "attend/cpu/kernels.h"
#include "attend/cpu/tiles.h"
#include "core/arena.h"
#include "model/records.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attend/cpu/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/products-inl.h"

#ifndef WINNOW_ATTEND_SIMD_ONCE
#define WINNOW_ATTEND_SIMD_ONCE
namespace winnow::internal::attend::cpu {
namespace {

constexpr int kBlock = 64;       // records per block
constexpr int kKeyStride = 592;  // floats; 37 cache lines, odd, so that 64 rows fill all L1 sets
static_assert(kBlock <= kMaxBlock && kKeyStride >= kMaxKeyDim);

struct Scratch {
  float* keys;                   // [kBlock][kKeyStride]
  float* queries;                // panels of heads, each [d_qk][panel width]
  internal::cpu::Columns heads;  // S and its softmax
  size_t bytes;

  Scratch(Arena arena, int32_t count) : heads(arena, kBlock, count) {
    keys = arena.take<float>(kBlock * kKeyStride);
    queries = arena.take<float>(kMaxKeyDim * heads.width);
    bytes = arena.bytes();
  }
};

}  // namespace
}  // namespace winnow::internal::attend::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::attend::cpu::HWY_NAMESPACE {

using namespace internal::cpu::HWY_NAMESPACE;

// The token's queries, transposed into panels; heads past the last are zero.
void pack_queries(const Params& p, int64_t token, int64_t d_nope, float* out) {
  const bf16* q = p.q + token * p.q_token_stride;
  const bf16* rope = p.q_rope + token * p.rope_token_stride;
  for_panels(p.heads, [&](auto tag, auto vectors, int64_t first) {
    const int64_t wide = hn::MaxLanes(decltype(tag)()) * vectors;
    for (int64_t i = 0; i < wide; ++i) {
      const int64_t h = first + i;
      const bool there = h < p.heads;
      for (int64_t d = 0; d < d_nope; ++d)
        out[d * wide + i] = there ? to_float(q[h * p.q_head_stride + d]) : 0.0f;
      for (int64_t d = 0; d < V32::kRope; ++d)
        out[(d_nope + d) * wide + i] = there ? to_float(rope[h * p.rope_head_stride + d]) : 0.0f;
    }
    out += (d_nope + V32::kRope) * wide;
  });
}

// Whether the e4m3 codes (and scales, given as floats) take the fast path: no NaN code, and scales
// whose 256-fold is finite.
template <class R>
HWY_INLINE bool plain(const uint8_t* codes, const float* scales) {
  for (int i = 0; i < R::kTiles; ++i)
    if (!(std::fabs(scales[i]) <= 1e36f)) return false;
  const hn::CappedTag<uint8_t, 64> d;
  const auto all = hn::Set(d, uint8_t{0x7f});
  auto found = hn::Zero(d);
  for (size_t i = 0; i < R::kNope; i += hn::Lanes(d)) {
    const auto equal = hn::Eq(hn::And(hn::LoadU(d, codes + i), all), all);
    found = hn::Or(found, hn::VecFromMask(d, equal));
  }
  return hn::AllTrue(d, hn::Eq(found, hn::Zero(d)));
}

// Records of a list as fp32 rows.
template <class R>
void load_rows(const ListView& list, const Entry* rows, int32_t count, float* out) {
  const Full d;
  for (int32_t n = 0; n < count; ++n, out += kKeyStride) {
    const std::byte* page = list.data + rows[n].page * list.page_stride;
    const int64_t off = rows[n].offset;
    if constexpr (R::kQuantized) {
      const hn::Rebind<int8_t, Full> d8;
      const hn::Rebind<int16_t, Full> d16;
      const hn::Rebind<hwy::float16_t, Full> dh;
      const auto* codes = reinterpret_cast<const int8_t*>(page + R::row(off, list.page));
      const auto* stored =
          reinterpret_cast<const typename R::Scale*>(page + R::scales(off, list.page));
      float scales[R::kTiles];
      for (int i = 0; i < R::kTiles; ++i)
        if constexpr (sizeof(stored[0]) == 1) scales[i] = from_ue8m0(stored[i]);
        else scales[i] = stored[i];
      if (!plain<R>(reinterpret_cast<const uint8_t*>(codes), scales)) {
        dequantize(list, rows[n], out);
        continue;
      }
      // An e4m3 code is an fp16 one with three exponent bits less: shifted into place it is worth
      // 2^-8 of its value, exactly, subnormals included.
      for (int i = 0; i < R::kTiles; ++i) {
        const auto scale = hn::Set(d, scales[i] * 256.0f);
        for (size_t j = i * R::kTile; j < size_t(i + 1) * R::kTile; j += kLanes) {
          const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, codes + j));
          const auto half = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, int16_t(0xbf80)));
          hn::StoreU(hn::Mul(hn::PromoteTo(d, hn::BitCast(dh, half)), scale), d, out + j);
        }
      }
      const auto* rope = reinterpret_cast<const bf16*>(page + R::rope(off, list.page));
      for (size_t j = 0; j < R::kRope; j += kLanes)
        hn::StoreU(load_bf16(d, rope + j), d, out + R::kNope + j);
    } else {
      const auto* row = reinterpret_cast<const bf16*>(page + R::row(off, list.page));
      for (size_t j = 0; j < R::kDim; j += kLanes) hn::StoreU(load_bf16(d, row + j), d, out + j);
    }
  }
}

// Asks for the records of the next block while this one is worked on.
void prefetch_rows(const Params& p, const Rows& rows) {
  for (int32_t n = 0; n < rows.count; ++n) {
    const ListView& list = p.lists[n >= rows.cut];
    with_latent(list.format, [&](auto record) {
      using R = decltype(record);
      const std::byte* page = list.data + rows.row[n].page * list.page_stride;
      const std::byte* row = page + R::row(rows.row[n].offset, list.page);
      for (int64_t b = 0; b < R::kRowBytes; b += 64) __builtin_prefetch(row + b, 0, 2);
      if constexpr (R::kQuantized)
        __builtin_prefetch(page + R::scales(rows.row[n].offset, list.page), 0, 2);
    });
  }
}

void simd_tile(const Params& p, const TileJob& job, std::byte* memory) {
  const auto [d_qk, d_nope] = with_latent(p.lists[0].format, [](auto r) {
    return std::pair{decltype(r)::kDqk, decltype(r)::kNope};
  });
  const Scratch s(Arena({memory, Scratch(Arena(), p.heads).bytes}), p.heads);
  if (job.new_query) pack_queries(p, job.token, d_nope, s.queries);
  s.heads.reset(kBlock);
  for (int32_t h = 0; h < p.heads; ++h) std::memset(job.parts[h].o, 0, sizeof(job.parts[h].o));

  Cursor cursor(p, job);
  Rows blocks[2];
  cursor.fill(blocks[0], kBlock);
  for (int turn = 0; blocks[turn].count > 0; turn ^= 1) {
    const Rows& rows = blocks[turn];
    // Dequantise this block, ask for the next.
    const auto load = [&](int list, int32_t from, int32_t to) {
      with_latent(p.lists[list].format, [&](auto record) {
        load_rows<decltype(record)>(p.lists[list], rows.row + from, to - from,
                                    s.keys + from * kKeyStride);
      });
    };
    load(0, 0, rows.cut);
    load(1, rows.cut, rows.count);
    cursor.fill(blocks[turn ^ 1], kBlock);
    prefetch_rows(p, blocks[turn ^ 1]);
    // Rows up to a whole group take part in S and are not looked at afterwards.
    for (int32_t n = rows.count; n % kRows; ++n)
      std::memset(s.keys + n * kKeyStride, 0, kMaxKeyDim * sizeof(float));
    logits(s.heads, {.k = s.keys,
                     .queries = s.queries,
                     .row = kKeyStride,
                     .size = d_qk,
                     .columns = p.heads,
                     .count = rows.count});
    softmax(s.heads, rows.count, p.scale);
    add_values(s.heads, {.v = s.keys,
                         .o = job.parts[0].o,
                         .v_row = kKeyStride,
                         .o_row = sizeof(Partial) / sizeof(float),
                         .size = kValueDim,
                         .columns = p.heads,
                         .keys = rows.count});
  }
  for (int32_t h = 0; h < p.heads; ++h) {
    Partial& part = job.parts[h];
    part.m = s.heads.m[h];
    part.l = part.w = s.heads.l[h];
    part.max = s.heads.max[h];
    job.ready(h, part);
  }
}

}  // namespace winnow::internal::attend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::attend::cpu {

HWY_EXPORT(simd_tile);

namespace {

constexpr TileKernel kSimd{[](int32_t heads) { return Scratch(Arena(), heads).bytes; },
                           [](const Params& p, const TileJob& job, std::byte* scratch) noexcept {
                             HWY_DYNAMIC_DISPATCH(simd_tile)(p, job, scratch);
                           }};

}  // namespace

void simd(const Params& p) noexcept { run_tiles(p, kSimd); }
size_t simd_workspace(const Shape& shape, int64_t tiles) {
  return tile_workspace(shape, tiles, kSimd);
}

}  // namespace winnow::internal::attend::cpu
#endif  // HWY_ONCE
