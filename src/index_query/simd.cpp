// index_query with portable vectors, parallel over heads. Budget: 256 B read and 128 B written a
// head; everything between stays in L1.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "index_query/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index_query/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"
#include "cpu/stream_simd.h"
#include "cpu/write_record_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::index_query::HWY_NAMESPACE {

namespace hs = cpu::HWY_NAMESPACE;

constexpr int64_t kRows = 8;  // heads that go through each step together

// Heads behind their rotation, and where they belong.
struct Block {
  int64_t count = 0;
  int64_t tokens[kRows];
  int64_t heads[kRows];
  uint16_t most[kRows];  // largest magnitudes
  HWY_ALIGN bf16 rows[kRows * kWidth];
};

// The head in its row of the block, rotated.
HWY_INLINE void turn_head(const Params& p, const hs::TokenAngles& angles, hs::Rounding rounding,
                          const bf16* q, bf16* row) {
  const int64_t begin = core::rope_begin(p.rope, kWidth);
  const int64_t other = kRopeDim - begin;  // the half that stays
  angles.rotate(q + begin, row + begin, rounding);
  hs::copy_64(q + other, row + other);
  if (p.hadamard) hs::hadamard_row(row, row);
}

// Whether codes go past the caches: those of a long call, whose lines would be read before they are
// written. An Intel Xeon gains nothing by it: it computes for longer than it waits.
bool past_caches(const Params& p) {
  return !p.out_is_bf16 && !cpu::isa().intel && hs::is_long(p.tokens * p.heads * kWidth) &&
         hs::at_line(p.out) && p.out_token % hs::kLine == 0 && p.out_head % hs::kLine == 0;
}

// Step by step over all heads: one alone would wait for its largest magnitude.
HWY_INLINE void store_block(const Params& p, const hs::TileQuantizer& quantizer, bool stream,
                            Block& block) {
  alignas(hs::kLine) uint8_t codes[kWidth];
  const auto row = [&](int64_t r) { return block.rows + r * kWidth; };
  for (int64_t r = 0; r < block.count && !p.out_is_bf16; ++r)
    block.most[r] = hs::largest_magnitude<kWidth>(row(r));
  for (int64_t r = 0; r < block.count; ++r) {
    const int64_t t = block.tokens[r];
    const int64_t h = block.heads[r];
    const int64_t to = t * p.out_token + h * p.out_head;
    float scale = 1;
    if (p.out_is_bf16) std::memcpy(static_cast<bf16*>(p.out) + to, row(r), kWidth * sizeof(bf16));
    else
      scale = hs::write_tile<kWidth>(quantizer, block.most[r], row(r),
                                     stream ? codes : static_cast<uint8_t*>(p.out) + to);
    if (stream) hs::stream_lines(codes, kWidth, static_cast<uint8_t*>(p.out) + to);
    p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
        weight_of(p, t, h) * scale * p.factor;
  }
  block.count = 0;
}

// Asks for a head, counted as token * heads + head.
HWY_INLINE void prefetch_head(const Params& p, int64_t at) {
  constexpr int64_t kValues = hs::kLine / static_cast<int64_t>(sizeof(bf16));
  const bf16* q = p.q + at / p.heads * p.q_token + at % p.heads * p.q_head;
  for (int64_t i = 0; i < kWidth; i += kValues) __builtin_prefetch(q + i, 0, 2);
}

// Heads [first, last) of all tokens, counted as token * heads + head.
void prepare_heads(const Params& p, int64_t first, int64_t last) {
  const hs::TileQuantizer quantizer(p.quantizer);
  hs::TokenAngles angles(p.rope, p.positions, p.position_stride);
  // Subnormal values of a head become zeros as codes; the sums of a Hadamard rotation could tell.
  const hs::Rounding rounding = hs::rounding_of(!p.out_is_bf16 && !p.hadamard);
  const bool stream = past_caches(p);
  Block block;
  int64_t t = first / p.heads;
  int64_t h = first % p.heads;
  constexpr int64_t kAhead = 2 * kRows;
  for (int64_t at = first; at < last; ++at) {
    if (at + kAhead < last) prefetch_head(p, at + kAhead);
    if (angles.load(t)) {
      turn_head(p, angles, rounding, p.q + t * p.q_token + h * p.q_head,
                block.rows + block.count * kWidth);
      block.tokens[block.count] = t;
      block.heads[block.count++] = h;
      if (block.count == kRows) store_block(p, quantizer, stream, block);
    }
    if (++h == p.heads) {
      h = 0;
      ++t;
    }
  }
  store_block(p, quantizer, stream, block);
  if (stream) hwy::FlushStream();
}

}  // namespace winnow::internal::index_query::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::index_query {

HWY_EXPORT(prepare_heads);

void simd(const Params& p) noexcept {
  const int64_t count = p.tokens * p.heads;
  // 48 KB of traffic, above the cost of a task; more where every worker has some.
  const int64_t heads = std::clamp<int64_t>(count / (16 * cpu::threads()), 128, 1024);
  cpu::parallel_for(ceil_div(count, heads), [&](int64_t task, int) {
    const int64_t first = task * heads;
    HWY_DYNAMIC_DISPATCH(prepare_heads)(p, first, std::min(first + heads, count));
  });
}

}  // namespace winnow::internal::index_query
#endif  // HWY_ONCE
