// write, gather, join and quantize with portable vectors, in parallel over tokens (or rows, or
// spans of elements). Bit for bit the reference.
//
// Budget, V3.2 fp8: a token reads 1,152 B and writes 656 B. Encoding takes some 20 vector
// operations for each vector of values, and kAmax a division; two passes over a tile, the second
// from L1. Whole lines go past the caches in long calls.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "model/records.h"
#include "write/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "write/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/formats_simd.h"
#include "cpu/prologue_simd.h"
#include "cpu/stream_simd.h"
#include "cpu/write_record_simd.h"
#include "write/prologue_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::write::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace hs = cpu::HWY_NAMESPACE;

// The next tokens from `t` on that have a slot and a position.
template <class R>
HWY_INLINE Block next_block(const Params& p, int64_t& t, int64_t last) {
  Block block;
  for (; t < last && block.count < kRows; ++t) {
    const int64_t slot = p.slots[t * p.slot_stride];
    if (slot < 0) continue;
    const int64_t r = block.count;
    block.angles[r] = nullptr;
    if (p.rope.table) {
      const int64_t position = p.positions[t * p.position_stride];
      if (!in_table(p.rope, position)) continue;
      block.angles[r] = angles_row(p.rope, position);
    }
    std::byte* page = p.cache.data + slot / p.cache.page * p.cache.stride;
    const hs::RecordPlace<R> place(page, slot % p.cache.page, p.cache.page);
    block.tokens[r] = t;
    block.rows[r] = p.kv + t * p.kv_stride;
    block.records[r] = place.row;
    block.scales[r] = place.scales;
    block.count = r + 1;
  }
  return block;
}

template <class R>
hs::RecordPlace<R> place_of(const Block& block, int64_t r) {
  return {block.records[r], block.scales[r]};
}

// Whether subnormal values of a row may become zeros in its prologue. The sums of a Hadamard
// rotation could tell.
template <class R>
bool may_flush(const Params& p) {
  return R::kQuantized && !p.hadamard && hs::can_round_flushing();
}

// A record of V3.2, whose scales have no floor to speak of, once more without flushing, if a tile's
// largest magnitude is below 2^-90.
HWY_NOINLINE void rewrite_small(const Params& p, const hs::RowNorm& norm,
                                const hs::TileQuantizer& quantizer, const Block& block, int64_t r) {
  using R = V32Fp8;
  hwy::FlushStream();  // the record may be on its way past the caches
  HWY_ALIGN bf16 row[R::kDim];
  Block one;
  one.count = 1;
  one.tokens[0] = block.tokens[r];
  one.rows[0] = block.rows[r];
  one.angles[0] = block.angles[r];
  const Block none{};
  BlockFactors factors;
  begin_rows<R>(p, norm, one, factors);
  finish_rows<R>(p, norm, false, one, {none, false}, factors, row);
  hs::TilePlans plans;
  hs::plan_record<R>(quantizer, row, plans);
  hs::write_record<R, kOrder<R>>(quantizer, plans, 0, row, row + R::kNope, place_of<R>(block, r));
}

// Asks for the memory of row r of the block behind: slots may be anywhere.
template <class R>
HWY_INLINE void prefetch_place(bool stream, const Block& block, int64_t r) {
  if (r >= block.count) return;
  const hs::RecordPlace<R> next = place_of<R>(block, r);
  if (stream) hs::prefetch_edges<R>(next);
  else hs::prefetch_record<R>(next);
}

// The plans of a block's rows behind their prologue. Records of several tiles have their own, those
// of one tile share them.
template <class R>
class BlockPlans {
 public:
  HWY_INLINE void find(const hs::TileQuantizer& quantizer, int64_t count, const bf16* rows) {
    if constexpr (kShared) {
      const auto row = [&](int i) WINNOW_INLINED {
        return rows + std::min<int64_t>(i, count - 1) * R::kDim;
      };
      hs::largest_magnitudes<R::kTile, kRows>(row, plans_[0]);
      hs::plan_tiles<kRows>(quantizer, plans_[0]);
    } else if constexpr (R::kQuantized) {
      for (int64_t r = 0; r < count; ++r)
        hs::plan_record<R>(quantizer, rows + r * R::kDim, plans_[r]);
    }
  }
  hs::TilePlans& of(int64_t r) { return plans_[kShared || !R::kQuantized ? 0 : r]; }
  static int first(int64_t r) { return kShared ? static_cast<int>(r) : 0; }

 private:
  static constexpr bool kShared = std::is_same_v<R, IndexKeys>;
  hs::TilePlans plans_[kShared || !R::kQuantized ? 1 : kRows];
};

// Stores the block, whose rows are given, while the memory of the one behind it is on its way. Its
// rows would be read from memory for plans of all of them, so each goes by itself.
template <class R>
HWY_INLINE void write_given(const Params& p, const hs::TileQuantizer& quantizer, bool stream,
                            bool to_l1, const Block& block, const Block& behind) {
  hs::TilePlans plans;
  for (int64_t r = 0; r < block.count; ++r) {
    prefetch_row<R>(p, RopeParams(), to_l1, behind, r);
    prefetch_place<R>(stream, behind, r);
    const bf16* values = block.rows[r];
    const bf16* rope = p.rope_part + block.tokens[r] * p.rope_stride;
    const hs::RecordPlace<R> to = place_of<R>(block, r);
    hs::plan_record<R>(quantizer, values, plans);
    if (stream) hs::stream_record<R, hs::Order::kInTurn>(quantizer, plans, 0, values, rope, to);
    else hs::write_record<R, hs::Order::kInTurn>(quantizer, plans, 0, values, rope, to);
  }
}

// Stores the block, whose rows stand behind their prologue and whose tiles are planned, while the
// memory of the one behind it is on its way.
template <class R>
HWY_INLINE void write_prepared(const Params& p, const hs::RowNorm& norm,
                               const hs::TileQuantizer& quantizer, bool stream, bool flush,
                               const Block& block, const Block& behind, BlockPlans<R>& plans,
                               const bf16* rows) {
  for (int64_t r = 0; r < block.count; ++r) {
    prefetch_place<R>(stream, behind, r);
    const bf16* values = rows + r * R::kDim;
    const hs::RecordPlace<R> to = place_of<R>(block, r);
    hs::TilePlans& own = plans.of(r);
    const int first = plans.first(r);
    const bf16* rope = values + R::kNope;
    if (stream) hs::stream_record<R, kOrder<R>>(quantizer, own, first, values, rope, to);
    else hs::write_record<R, kOrder<R>>(quantizer, own, first, values, rope, to);
    if constexpr (std::is_same_v<R, V32Fp8>) {
      constexpr uint16_t kSmall = (127 - 90) << 7;
      if (flush && *std::min_element(own.most, own.most + R::kTiles) < kSmall)
        rewrite_small(p, norm, quantizer, block, r);
    }
  }
}

template <class R>
void write_given_tokens(const Params& p, bool stream, int64_t first, int64_t last) {
  const hs::TileQuantizer quantizer(p.quantizer);
  const bool to_l1 = asks_for_l1();
  int64_t t = first;
  for (Block block = next_block<R>(p, t, last); block.count > 0;) {
    const Block behind = next_block<R>(p, t, last);
    write_given<R>(p, quantizer, stream, to_l1, block, behind);
    block = behind;
  }
}

// Steps of two blocks in turn, so that none waits for the one before it: a step's last results take
// as long as two or three of its rows, and the core does not look further ahead than that.
template <class R>
void write_prepared_tokens(const Params& p, bool stream, int64_t first, int64_t last) {
  const hs::TileQuantizer quantizer(p.quantizer);
  const hs::RowNorm norm(p.norm, p.norm_width);
  const bool flush = may_flush<R>(p);
  HWY_ALIGN bf16 rows[kRows * R::kDim];
  BlockFactors factors;
  BlockPlans<R> plans;
  const bool to_l1 = asks_for_l1();
  int64_t t = first;
  Block blocks[3];  // in turn: the one at hand, the next, and the one whose places are asked for
  for (int i = 0; i < 3; ++i) {
    Block& block = blocks[i];
    block = next_block<R>(p, t, last);
    if (i < kAhead<R>)
      for (int64_t r = 0; r < block.count; ++r) prefetch_row<R>(p, p.rope, to_l1, block, r);
    if (i < 2)
      for (int64_t r = 0; r < block.count; ++r) prefetch_place<R>(stream, block, r);
  }
  begin_rows<R>(p, norm, blocks[0], factors);
  finish_rows<R>(p, norm, flush, blocks[0], {blocks[kAhead<R>], to_l1}, factors, rows);
  for (int at = 0; blocks[at].count > 0; at = at < 2 ? at + 1 : 0) {
    Block& block = blocks[at];
    const Block& next = blocks[at < 2 ? at + 1 : 0];
    const Block& behind = blocks[at > 0 ? at - 1 : 2];
    plans.find(quantizer, block.count, rows);
    if (kEarly<R>) begin_rows<R>(p, norm, next, factors);
    write_prepared<R>(p, norm, quantizer, stream, flush, block, behind, plans, rows);
    block = next_block<R>(p, t, last);
    if (!kEarly<R>) begin_rows<R>(p, norm, next, factors);
    finish_rows<R>(p, norm, flush, next, {kEarly<R> ? block : behind, to_l1}, factors, rows);
  }
}

template <class R>
void write_tokens_of(const Params& p, int64_t first, int64_t last) {
  const bool stream = hs::past_caches<R>(p.cache, p.tokens);
  if (p.prologue) write_prepared_tokens<R>(p, stream, first, last);
  else write_given_tokens<R>(p, stream, first, last);
  if (stream) hwy::FlushStream();
}

void write_tokens(const Params& p, int64_t first, int64_t last) {
  with_record(p.cache.format,
              [&](auto record) { write_tokens_of<decltype(record)>(p, first, last); });
}

template <class R>
void gather_rows_of(const GatherParams& p, int64_t request, const Run& run) {
  for (int64_t i = 0; i < run.count; ++i) {
    bf16* out = p.out + (run.row + i) * p.out_stride;
    const std::byte* page = page_of(p, request, run.token + i);
    if (!page) {
      std::memset(out, 0, R::kDim * 2);
      continue;
    }
    const int64_t off = (run.token + i) % p.cache.page;
    const std::byte* row = page + R::row(off, p.cache.page);
    if constexpr (R::kQuantized) {
      const hn::CappedTag<float, R::kTile> df;
      const int lanes = static_cast<int>(hn::Lanes(df));
      const auto* codes = reinterpret_cast<const uint8_t*>(row);
      const auto* scales =
          reinterpret_cast<const typename R::Scale*>(page + R::scales(off, p.cache.page));
      for (int tile = 0; tile < R::kTiles; ++tile) {
        const auto scale = hn::Set(df, get_scale(scales + tile));
        for (int j = tile * R::kTile; j < (tile + 1) * R::kTile; j += lanes)
          hs::store_bf16(df, hn::Mul(hs::load_e4m3(df, codes + j), scale), out + j);
      }
      std::memcpy(out + R::kNope, page + R::rope(off, p.cache.page), R::kRope * 2);
    } else {
      std::memcpy(out, row, R::kDim * 2);
    }
  }
}

void gather_rows(const GatherParams& p, int64_t request, const Run& run) {
  with_latent(p.cache.format,
              [&](auto record) { gather_rows_of<decltype(record)>(p, request, run); });
}

template <class DF>
HWY_INLINE hn::VFromD<DF> load(DF df, const bf16* x) {
  return hs::load_bf16(df, x);
}
template <class DF>
HWY_INLINE hn::VFromD<DF> load(DF df, const float* x) {
  return hn::LoadU(df, x);
}

// Largest magnitude of x[0, n); the ragged end goes through a vector padded with zeros.
template <class T>
float largest_of(const T* x, int64_t n) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  auto amax = hn::Zero(df);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) amax = hs::max_magnitude(df, amax, load(df, x + i));
  if (i < n) {
    HWY_ALIGN T tail[hn::MaxLanes(df)] = {};
    std::memcpy(tail, x + i, (n - i) * sizeof(T));
    amax = hs::max_magnitude(df, amax, load(df, tail));
  }
  return hn::GetLane(hn::MaxOfLanes(df, amax));
}

template <class T>
void encode_of(const T* x, int64_t n, float factor, uint8_t* out) {
  const hn::ScalableTag<float> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto s = hn::Set(df, factor);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hs::store_e4m3(df, hn::Mul(load(df, x + i), s), out + i);
  if (i < n) {
    HWY_ALIGN T tail[hn::MaxLanes(df)] = {};
    uint8_t codes[hn::MaxLanes(df)];
    std::memcpy(tail, x + i, (n - i) * sizeof(T));
    hs::store_e4m3(df, hn::Mul(load(df, tail), s), codes);
    std::memcpy(out + i, codes, n - i);
  }
}

float largest(const QuantizeParams& p, int64_t first, int64_t n) {
  return p.is_bf16 ? largest_of(static_cast<const bf16*>(p.x) + first, n)
                   : largest_of(static_cast<const float*>(p.x) + first, n);
}

void encode(const QuantizeParams& p, int64_t first, int64_t n, float factor) {
  auto* out = reinterpret_cast<uint8_t*>(p.out) + first;
  if (p.is_bf16) encode_of(static_cast<const bf16*>(p.x) + first, n, factor, out);
  else encode_of(static_cast<const float*>(p.x) + first, n, factor, out);
}

}  // namespace winnow::internal::write::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::write {

HWY_EXPORT(write_tokens);
HWY_EXPORT(gather_rows);
HWY_EXPORT(largest);
HWY_EXPORT(encode);

namespace simd {

namespace {

// body(first, last) over [0, count) in blocks of `block`.
template <class F>
void in_blocks(int64_t count, int64_t block, F&& body) {
  cpu::parallel_for(ceil_div(count, block), [&](int64_t task, int) {
    body(task * block, std::min((task + 1) * block, count));
  });
}

}  // namespace

void write(const Params& p) noexcept {
  // 1 us or more, above the cost of handing out a task; longer where every worker has some, since
  // nothing has asked for a task's first rows.
  const int64_t block = std::clamp<int64_t>(p.tokens / (4 * cpu::threads()), 16, 512);
  in_blocks(p.tokens, block, [&](int64_t first, int64_t last) {
    HWY_DYNAMIC_DISPATCH(write_tokens)(p, first, last);
  });
}

void gather(const GatherParams& p) noexcept {
  int64_t total = 0, sum = 0;
  for (int64_t r = 0; r < p.requests; ++r) total += run_of(p, r, sum).count;
  // Each block walks the lengths to find its rows: no list of runs to keep, R additions a block.
  const int64_t block = std::max<int64_t>(64, total / (8 * cpu::threads()));
  in_blocks(total, block, [&](int64_t first, int64_t last) {
    int64_t before = 0, row = 0;  // row counts the rows written by the requests before
    for (int64_t r = 0; r < p.requests && row < last; ++r) {
      Run run = run_of(p, r, before);
      const int64_t end = std::min(row + run.count, last), skip = std::max<int64_t>(first - row, 0);
      const int64_t count = end - row - skip;
      row += run.count;
      if (count <= 0) continue;
      HWY_DYNAMIC_DISPATCH(gather_rows)(p, r, Run{run.token + skip, run.row + skip, count});
    }
  });
}

void join(const JoinParams& p) noexcept {
  // Whole rows by memcpy where the innermost dimension is dense; else the reference, in parallel.
  const bool dense = p.latent.stride == 1 && p.rope.stride == 1 && p.out.stride == 1;
  in_blocks(p.tokens, std::max<int64_t>(1, 64 / (p.heads + 1)), [&](int64_t first, int64_t last) {
    if (!dense) {
      JoinParams part = p;
      part.tokens = last - first;
      for (View3* v : {&part.latent, &part.rope, &part.out})
        if (v->data) v->data += first * v->token_stride;
      return reference::join(part);
    }
    for (int64_t t = first; t < last; ++t)
      for (int64_t h = 0; h < p.heads; ++h) {
        bf16* out = p.out.data + t * p.out.token_stride + h * p.out.head_stride;
        for (const View3* from : {&p.latent, &p.rope}) {
          if (from->width == 0) continue;
          std::memcpy(out, from->data + t * from->token_stride + h * from->head_stride,
                      from->width * sizeof(bf16));
          out += from->width;
        }
      }
  });
}

void quantize(const QuantizeParams& p) noexcept {
  constexpr int64_t kBlock = 1 << 15;
  std::atomic<uint32_t> bits{0};  // of the maximum: floats >= 0 order as their bits do
  in_blocks(p.count, kBlock, [&](int64_t first, int64_t last) {
    const float part = HWY_DYNAMIC_DISPATCH(largest)(p, first, last - first);
    const uint32_t mine = std::bit_cast<uint32_t>(part);
    for (uint32_t seen = bits.load(std::memory_order_relaxed);
         seen < mine && !bits.compare_exchange_weak(seen, mine, std::memory_order_relaxed);) {
    }
  });
  const float factor = kE4m3Max / std::max(std::bit_cast<float>(bits.load()), 1e-10f);
  in_blocks(p.count, kBlock, [&](int64_t first, int64_t last) {
    HWY_DYNAMIC_DISPATCH(encode)(p, first, last - first, factor);
  });
  *p.scale = 1 / factor;
}

}  // namespace simd
}  // namespace winnow::internal::write
#endif  // HWY_ONCE
