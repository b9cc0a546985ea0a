// prepare_query with portable vectors, parallel over heads. Budget: 4 B of traffic a value; the
// norm's second pass and RoPE find the row in L1.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "prepare_query/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "prepare_query/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::prepare_query::HWY_NAMESPACE {

namespace hs = cpu::HWY_NAMESPACE;

// Requests the rotated values of a head. Those of heads that stay where they are lie apart, so that
// no prefetcher of the machine follows them.
HWY_INLINE void prefetch_slice(const bf16* slice) {
  constexpr int64_t kValues = 32;  // in a line
  for (int64_t i = 0; i < kRopeDim; i += kValues) __builtin_prefetch(slice + i, 1);
}

// Heads [first, last) of all tokens, counted as token * heads + head.
void prepare_heads(const Params& p, int64_t first, int64_t last) {
  const hs::RowNorm norm(p.norm, p.width);
  hs::TokenAngles angles(p.rope, p.positions, p.position_stride);
  const hs::Rounding rounding = hs::rounding_of(false);
  constexpr int64_t kAhead = 16;  // heads
  const bool in_place = p.norm.kind == NormKind::kNone && p.out == p.q;
  for (int64_t at = first; at < last; ++at) {
    const int64_t t = at / p.heads;
    const int64_t h = at % p.heads;
    if (!angles.load(t)) continue;
    const bf16* q = p.q + t * p.q_token + h * p.q_head;
    bf16* out = p.out + t * p.out_token + h * p.out_head;
    if (p.norm.kind != NormKind::kNone) norm(q, out);
    else if (out != q) std::memcpy(out, q, p.width * sizeof(bf16));
    bf16* slice = out + core::rope_begin(p.rope, p.width);
    if (in_place && at + kAhead < last) prefetch_slice(slice + kAhead * p.out_head);
    angles.rotate(slice, slice, rounding);
  }
}

}  // namespace winnow::internal::prepare_query::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::prepare_query {

HWY_EXPORT(prepare_heads);

void simd(const Params& p) noexcept {
  const int64_t count = p.tokens * p.heads;
  // 64 KB of traffic, above the cost of a task; more where every worker has some, since short
  // pieces of memory in turn with other workers' come more slowly.
  const int64_t least = 1 + 16384 / p.width;
  const int64_t block = std::clamp(count / (16 * cpu::threads()), least, 8 * least);
  cpu::parallel_for(ceil_div(count, block), [&](int64_t task, int) {
    const int64_t first = task * block;
    HWY_DYNAMIC_DISPATCH(prepare_heads)(p, first, std::min(first + block, count));
  });
}

}  // namespace winnow::internal::prepare_query
#endif  // HWY_ONCE
