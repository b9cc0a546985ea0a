// index_query with portable vectors, parallel over heads. Budget: 256 B read and 128 B written a
// head; everything between stays in L1.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "index_query/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index_query/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/prologue_simd.h"
#include "cpu/write_record_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::index_query::HWY_NAMESPACE {

namespace hs = cpu::HWY_NAMESPACE;

// Heads [first, last) of all tokens, counted as token * heads + head.
void prepare_heads(const Params& p, int64_t first, int64_t last) {
  hs::TokenAngles angles(p.rope, p.positions, p.position_stride);
  for (int64_t at = first; at < last; ++at) {
    const int64_t t = at / p.heads;
    const int64_t h = at % p.heads;
    if (!angles.load(t)) continue;
    HWY_ALIGN bf16 row[kWidth];
    std::memcpy(row, p.q + t * p.q_token + h * p.q_head, sizeof row);
    bf16* slice = row + core::rope_begin(p.rope, kWidth);
    hs::rotate_row(p.rope, angles.values, slice, slice);
    if (p.hadamard) hs::hadamard_row(row, row);
    const int64_t to = t * p.out_token + h * p.out_head;
    float scale = 1;
    if (p.out_is_bf16) std::memcpy(static_cast<bf16*>(p.out) + to, row, sizeof row);
    else scale = hs::write_tile<kWidth>(p.quantizer, row, static_cast<uint8_t*>(p.out) + to);
    p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
        weight_of(p, t, h) * scale * p.factor;
  }
}

}  // namespace winnow::internal::index_query::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::index_query {

HWY_EXPORT(prepare_heads);

void simd(const Params& p) noexcept {
  const int64_t count = p.tokens * p.heads;
  constexpr int64_t kHeads = 128;  // 48 KB of traffic: above the cost of a task
  cpu::parallel_for(ceil_div(count, kHeads), [&](int64_t task, int) {
    const int64_t first = task * kHeads;
    HWY_DYNAMIC_DISPATCH(prepare_heads)(p, first, std::min(first + kHeads, count));
  });
}

}  // namespace winnow::internal::index_query
#endif  // HWY_ONCE
