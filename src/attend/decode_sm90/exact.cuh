// Decode on Hopper: V3.2 blocks with odd scales, which fp16 does not carry: they are too far apart
// within a token, or too large. No writer makes such scales, but a reader accepts them. In both
// products the block's values are then e4m3 * scale rounded to bf16. Such a block takes tens of
// microseconds longer. V4's scales are powers of two, which fp16 carries well enough without this
// path (docs/decode-sm90.md, "Every value").
#pragma once

#include "attend/decode_sm90/span.cuh"
#include "cuda/mma.h"

namespace winnow::internal::attend::decode_sm90 {

// Whether a scale is odd: `relative`, the scale over the token's power of two, is too large or not
// precise enough as fp16. A scale below 2^-100 is not odd: tiles of zeros have such scales, and it
// may become 0.
__device__ __forceinline__ bool is_odd_scale(float scale, float relative) {
  return (fabsf(scale) >= 0x1p-100f) & !((fabsf(relative) >= 0x1p-16f) & (fabsf(relative) < 128.f));
}

// Two e4m3 values (as fp16), each times its scale, as bf16.
__device__ __forceinline__ uint32_t exact_pair(uint32_t halves, float scale0, float scale1) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack<true>(x.x * scale0, x.y * scale1);
}

// Scale `tile` of a row in the ring, 0 for a row without a token.
template <class Row, int kHeads>
__device__ __forceinline__ float scale_of(const Smem<Row, kHeads>& smem, int kv_stage, int row,
                                          int tile) {
  if (!((smem.valid[kv_stage] >> row) & 1)) return 0.f;
  const uint8_t* scales =
      smem.ring[kv_stage] + row * ConfigOf<Row, kHeads>::kPitch + Row::kScaleOffset;
  return *reinterpret_cast<const float*>(scales + tile * 4);
}

// S^T of a warp's 16 rows, from Q as the caller stores it, into smem.log2_p. It takes 32 heads at a
// time, and is called, so that it costs the loop around it as few registers as possible.
template <class Row, int kHeads>
__device__ __noinline__ void exact_scores(Smem<Row, kHeads>& smem, const Args& args, int token,
                                          int kv_stage) {
  // Computed again rather than kept in registers of the loop around.
  Span span = span_here<kHeads>(args);
  span.token = token;
  constexpr int kPitch = ConfigOf<Row, kHeads>::kPitch;
  constexpr int kEights = kHeads / 8 < 4 ? kHeads / 8 : 4;
  const int thread = thread_here() & 127;
  const int quad = thread & 3;
  const int row = (thread & 31) >> 2;
  const uint8_t* rows = smem.ring[kv_stage] + row * kPitch;
#pragma unroll 1
  for (int first = 0; first < kHeads / 8; first += kEights) {
    float s[kEights][4] = {};
#pragma unroll 1
    for (int d = 0; d < Row::kQk; d += 16) {
      const bool nope = d < Row::kNope;
      uint32_t a[4];
      // Rows r, r + 8, r, r + 8; columns 2 quad, then 8 further on.
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint8_t* from = rows + (k & 1) * 8 * kPitch;
        const int column = d + 2 * quad + (k & 2) * 4;
        if (nope) {
          const float scale = scale_of(smem, kv_stage, row + (k & 1) * 8, d / Row::kTile);
          uint32_t lo, hi;
          e4m3x4(*reinterpret_cast<const uint16_t*>(from + column), lo, hi);
          a[k] = exact_pair(lo, scale, scale);
        } else {
          a[k] = *reinterpret_cast<const uint32_t*>(from + Row::kRopeOffset +
                                                    (column - Row::kNope) * 2);
        }
      }
      const int64_t stride = nope ? args.q_head_stride : args.rope_head_stride;
      const bf16* q =
          (nope ? args.q + span.token * args.q_token_stride + d
                : args.q_rope + span.token * args.rope_token_stride + (d - Row::kNope)) +
          (span.head_begin + 8 * first + row) * stride + 2 * quad;
#pragma unroll
      for (int j = 0; j < kEights; j++, q += 8 * stride) {
        uint32_t b0 = 0;
        uint32_t b1 = 0;
        if (8 * (first + j) + row < span.head_count) {
          b0 = __ldg(reinterpret_cast<const uint32_t*>(q));
          b1 = __ldg(reinterpret_cast<const uint32_t*>(q + 8));
        }
        mma_bf16(s[j], a, b0, b1);
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; j++)
      if (first + j < kHeads / 8)
        smem.log2_p[first + j][thread] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
  }
}

// O^T += V^T P^T of a block whose P is bf16, for the warpgroup's 256 columns. Gives the block's
// stages back.
template <class Row, int kHeads>
__device__ __forceinline__ void exact_products(Smem<Row, kHeads>& smem, int kv_stage, int warpgroup,
                                               uint32_t p_desc, float (&o)[4][kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  static_assert(Config::kHasExactPath);
  const int thread = thread_here();
  const int lane = thread & 31;
  const int warp = (thread / 32) & 3;
  const int quad = lane & 3;
  const int row_offset = ((lane & 7) + 8 * ((lane >> 3) & 1)) * Config::kPitch;
#pragma unroll 1
  for (int step = 0; step < 4; step++) {
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const auto column = [&](int of) {
        return warpgroup * 256 + sixteen_of<Row, kHeads>(warp, of) * 16;
      };
      // Of two tiles, of which `tile` is one.
      uint32_t raw[4];
      uint32_t a[4];
      ldsm_t(raw, s32(smem.ring[kv_stage]) + row_offset + column((tile & 2) + (lane >> 4)));
      // Rows 2 quad and the next, then 8 further on.
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = 2 * quad + 8 * half;
        const int scale = column(tile) / Row::kTile;
        uint32_t even, odd;
        e4m3x4(__byte_perm(raw[(tile & 1) * 2 + half], 0, 0x3120), even, odd);
        const float scale0 = scale_of(smem, kv_stage, row, scale);
        const float scale1 = scale_of(smem, kv_stage, row + 1, scale);
        a[2 * half] = exact_pair(even, scale0, scale1);
        a[2 * half + 1] = exact_pair(odd, scale0, scale1);
      }
      wg_fence();
      wgmma_rs<kHeads, true, 1>(o[tile], a, fresh(p_desc + (step * 2048 >> 4)), 1);
      wg_commit();
      wg_wait<0>();
    }
    __syncwarp();
    if (lane == 0) mb_arrive(&smem.stage_empty[kv_stage]);
    if (++kv_stage == Config::kStages) kv_stage = 0;
  }
#pragma unroll
  for (int tile = 0; tile < 4; tile++) hold(o[tile]);
}

}  // namespace winnow::internal::attend::decode_sm90
