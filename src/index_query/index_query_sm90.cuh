// index_query on the device: 8 lanes per head, each with 8 values of the half that RoPE turns and 8
// of the other, and each thread two heads of its token at once, so that they share its angles. Of
// few heads in all a thread has one: the shortest wait. Most such calls go to few_sm90.cuh.
// Budget: 256 B read and 128 B written a head, and 256 B of angles a token; everything between
// stays in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/record.h"
#include "index_query/few_sm90.cuh"
#include "index_query/kernel.h"

namespace winnow::internal::index_query {

inline constexpr int kMost = 2;                  // heads of a thread
inline constexpr int64_t kFew = 4096;            // heads of a call whose threads have one
inline constexpr int kLanes = cuda::kRopeLanes;  // of a head

// What the kernels are made for. Plain calls have aligned rows, outputs and angles, codes and no
// Hadamard; RoPE turns pairs in place, or of halves.
enum class Form : uint8_t { kAny, kPairs, kHalves };

struct Call {
  Params p;
  int each = kMost;       // heads of a thread
  int rows = 1;           // heads that a block takes at a time: 8 lanes each
  uint32_t blocks = 0;    // of a token
  bool q_wide = false;    // 16 B in
  bool out_wide = false;  // 16 or 8 B out
};

inline int each_of(const Params& p) { return p.tokens * p.heads <= kFew ? 1 : kMost; }

// The call by blocks of `threads`, and how many of them.
inline Call call_of(const Params& p, int threads) {
  const int64_t bytes = p.out_is_bf16 ? 2 : 1;
  const int64_t piece = bytes * cuda::kPiece;
  Call call{p};
  call.each = each_of(p);
  call.rows = threads / kLanes;
  call.blocks = static_cast<uint32_t>(core::ceil_div(p.heads, int64_t{call.rows} * call.each));
  call.q_wide = cuda::is_wide(p.q, p.q_token * 2) && cuda::is_wide(p.q, p.q_head * 2);
  call.out_wide = reinterpret_cast<uintptr_t>(p.out) % piece == 0 &&
                  p.out_token * bytes % piece == 0 && p.out_head * bytes % piece == 0;
  return call;
}
inline unsigned blocks_of(const Call& call) {
  return static_cast<unsigned>(call.p.tokens * call.blocks);
}

inline Form form_of(const Call& call) {
  const Params& p = call.p;
  if (!call.q_wide || !call.out_wide || p.out_is_bf16 || p.hadamard || !cuda::is_wide(p.rope))
    return Form::kAny;
  return p.rope.half ? Form::kHalves : Form::kPairs;
}
// Whether prepare_few() takes the call.
inline bool is_few(const Call& call) { return form_of(call) != Form::kAny && fits_few(call.p); }
// Calls f(std::integral_constant<Form, form>, std::integral_constant<int, call.each>).
template <class F>
void with_form(Form form, const Call& call, F&& f) {
  const auto with_each = [&](auto of) {
    if (call.each == 1) f(of, std::integral_constant<int, 1>());
    else f(of, std::integral_constant<int, kMost>());
  };
  switch (form) {
    case Form::kAny: return with_each(std::integral_constant<Form, Form::kAny>());
    case Form::kPairs: return with_each(std::integral_constant<Form, Form::kPairs>());
    case Form::kHalves: return with_each(std::integral_constant<Form, Form::kHalves>());
  }
}

// A head's weight, requested here and looked at when the codes are made.
__device__ __forceinline__ uint32_t weight_bits(const Params& p, uint32_t token, uint32_t head) {
  const int64_t at = token * p.weight_token + head * p.weight_head;
  return p.weights_are_bf16 ? static_cast<const uint16_t*>(p.weights)[at]
                            : static_cast<const uint32_t*>(p.weights)[at];
}
__device__ __forceinline__ float weight_from(const Params& p, uint32_t bits) {
  return __uint_as_float(p.weights_are_bf16 ? bits << 16 : bits);
}

// Block `block` of a call, by all of its threads. kEach: call.each.
template <Form kForm, int kEach>
__device__ __forceinline__ void prepare(const Call& call, uint32_t block) {
  constexpr int kHalf = kWidth / 2;
  constexpr bool kPlain = kForm != Form::kAny;
  const Params& p = call.p;
  core::RopeParams rope = p.rope;
  if (kPlain) rope.half = kForm == Form::kHalves;
  const bool to_bf16 = !kPlain && p.out_is_bf16;
  const bool out_wide = kPlain || call.out_wide;
  uint32_t part = 0;  // of the token's blocks; most calls have one a token
  uint32_t t = block;
  if (call.blocks > 1) {
    t = cuda::divided(block, call.blocks);
    part = block - t * call.blocks;
  }
  const int64_t position = p.positions[t * p.position_stride];
  const int lane = threadIdx.x % kLanes;
  const int at = lane * cuda::kPiece;
  const uint32_t first = part * (call.rows * kEach) + threadIdx.x / kLanes;
  const auto heads = static_cast<uint32_t>(p.heads);
  // Pieces of the half that RoPE turns, and of the other one.
  const int turned_at = at + (p.rope.first ? 0 : kHalf);
  const int still_at = at + (p.rope.first ? kHalf : 0);
  uint4 turned[kEach], still[kEach];
  uint32_t weight[kEach];  // as it lies in memory
  const auto load = [&](bool wide) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t h = first + i * call.rows;
      turned[i] = still[i] = {};
      weight[i] = 0;
      if (h >= heads) continue;
      const bf16* q = p.q + t * p.q_token + h * p.q_head;
      turned[i] = cuda::load_piece(q, turned_at, kWidth, wide);
      still[i] = cuda::load_piece(q, still_at, kWidth, wide);
      weight[i] = weight_bits(p, t, h);
    }
  };
  if constexpr (kPlain) load(true);
  else call.q_wide ? load(true) : load(false);
  if (!core::in_table(rope, position)) return;
  const cuda::Turn turn = cuda::turn_of<kPlain>(rope, position, lane);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t h = first + i * call.rows;
    turned[i] = cuda::rotated(rope.half, turn, turned[i]);
    if (!kPlain && p.hadamard) {
      uint4 low = cuda::either(p.rope.first, turned[i], still[i]);
      uint4 high = cuda::either(p.rope.first, still[i], turned[i]);
      cuda::hadamard(low, high, lane);
      turned[i] = cuda::either(p.rope.first, low, high);
      still[i] = cuda::either(p.rope.first, high, low);
    }
    float scale = 1;
    if (!to_bf16) {
      const float amax = fmaxf(cuda::largest(turned[i]), cuda::largest(still[i]));
      scale = cuda::tile_scale<kLanes>(p.quantizer, amax);
    }
    if (h >= heads) continue;
    const int64_t to = t * p.out_token + h * p.out_head;
    if (to_bf16) {
      auto* out = static_cast<bf16*>(p.out) + to;
      cuda::store_piece(out, turned_at, kWidth, out_wide, turned[i]);
      cuda::store_piece(out, still_at, kWidth, out_wide, still[i]);
    } else {
      auto* out = static_cast<uint8_t*>(p.out) + to;
      const cuda::ScaleInverse by = cuda::scale_inverse(p.quantizer, scale);
      cuda::store_codes(out + turned_at, out_wide, cuda::codes_of(p.quantizer, by, turned[i]));
      cuda::store_codes(out + still_at, out_wide, cuda::codes_of(p.quantizer, by, still[i]));
    }
    if (lane == 0)
      p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
          __fmul_rn(__fmul_rn(weight_from(p, weight[i]), scale), p.factor);
  }
}

}  // namespace winnow::internal::index_query
