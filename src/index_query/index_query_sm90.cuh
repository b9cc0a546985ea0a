// index_query on the device: half a warp per head, 8 values a lane, each thread four heads of its
// token at once, so that they share the angles it has loaded. Budget: 256 B read and 128 B written
// a head, and 256 B of angles a token; everything between stays in registers.
#pragma once

#include <cuda_runtime.h>

#include "cuda/record.h"
#include "index_query/kernel.h"

namespace winnow::internal::index_query {

inline constexpr int kEach = 4;
inline constexpr int kLanes = kWidth / cuda::kPiece;  // of a head

struct Call {
  Params p;
  int rows = 1;           // heads that a block takes at a time: a half warp each
  uint32_t blocks = 0;    // of a token
  bool q_wide = false;    // 16 B in
  bool out_wide = false;  // 16 or 8 B out
};

// The call by blocks of `threads`, and how many of them.
inline Call call_of(const Params& p, int threads) {
  const int64_t bytes = p.out_is_bf16 ? 2 : 1;
  const int64_t piece = bytes * cuda::kPiece;
  Call call{p};
  call.rows = threads / kLanes;
  call.blocks = static_cast<uint32_t>(core::ceil_div(p.heads, call.rows * kEach));
  call.q_wide = cuda::is_wide(p.q, p.q_token * 2) && cuda::is_wide(p.q, p.q_head * 2);
  call.out_wide = reinterpret_cast<uintptr_t>(p.out) % piece == 0 &&
                  p.out_token * bytes % piece == 0 && p.out_head * bytes % piece == 0;
  return call;
}
inline unsigned blocks_of(const Call& call) {
  return static_cast<unsigned>(call.p.tokens * call.blocks);
}

__device__ __forceinline__ void store_codes(uint8_t* to, bool wide, const uint2& codes) {
  if (wide) {
    cuda::store8(to, codes);
    return;
  }
#pragma unroll
  for (int i = 0; i < cuda::kPiece; ++i)
    to[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
}

// Block `block` of a call, by all of its threads.
__device__ __forceinline__ void prepare(const Call& call, uint32_t block) {
  const Params& p = call.p;
  const int64_t t = block / call.blocks;
  const int64_t position = p.positions[t * p.position_stride];
  if (!core::in_table(p.rope, position)) return;
  const int lane = threadIdx.x % kLanes;
  const int at = lane * cuda::kPiece;
  const int rows = call.rows;
  const int64_t first = block % call.blocks * rows * kEach + threadIdx.x / kLanes;
  uint4 piece[kEach];
  float weight[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t h = first + i * rows;
    piece[i] = {};
    weight[i] = 0;
    if (h >= p.heads) continue;
    piece[i] = cuda::load_piece(p.q + t * p.q_token + h * p.q_head, at, kWidth, call.q_wide);
    weight[i] = weight_of(p, t, h);
  }
  const cuda::Turn turn = cuda::turn_of(p.rope, position, lane % cuda::kRopeLanes);
  const int64_t rope = core::rope_begin(p.rope, kWidth);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t h = first + i * rows;
    const uint4 turned = cuda::rotated(p.rope.half, turn, piece[i]);
    uint4 x = at >= rope && at < rope + kRopeDim ? turned : piece[i];
    if (p.hadamard) x = cuda::hadamard(x, lane);
    const float scale = p.out_is_bf16 ? 1.0f : cuda::tile_scale<kLanes>(p.quantizer, x);
    if (h >= p.heads) continue;
    const int64_t to = t * p.out_token + h * p.out_head;
    if (p.out_is_bf16)
      cuda::store_piece(static_cast<bf16*>(p.out) + to, at, kWidth, call.out_wide, x);
    else
      store_codes(static_cast<uint8_t*>(p.out) + to + at, call.out_wide,
                  cuda::codes_of(p.quantizer, scale, x));
    if (lane == 0)
      p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
          __fmul_rn(__fmul_rn(weight[i], scale), p.factor);
  }
}

}  // namespace winnow::internal::index_query
