// Decode on Hopper: V3.2 blocks with tokens whose scales fp16 does not carry (too far apart within
// a token, or too large), which no writer makes but a reader accepts. Their values are e4m3 * scale
// rounded to bf16, in both products. A block takes tens of microseconds longer. V4's scales are
// powers of two: fp16 is exact within 2^22 of a token's largest, more than e >= -22 and values
// below 448 can need.
#pragma once

#include <cfloat>

#include "attend/decode_sm90/layout.cuh"
#include "cuda/mma.h"
#include "cuda/wgmma_f16.h"

namespace winnow::internal::attend::decode_sm90 {

// Whether a scale, `relative` to the token's power of two, is not precise enough as fp16. Below
// 2^-100 (tiles of zeros have such scales) it may become 0.
__device__ __forceinline__ bool strange_scale(float scale, float relative) {
  return (fabsf(scale) >= 0x1p-100f) & !((fabsf(relative) >= 0x1p-16f) & (fabsf(relative) < 128.f));
}

// Two e4m3 values, each times its scale, as bf16.
__device__ __forceinline__ uint32_t exact_pair(uint32_t halves, float s0, float s1) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack<true>(x.x * s0, x.y * s1);
}

// Scale `tile` of a row in the ring, 0 for a row that no token fills.
template <class R, int N>
__device__ __forceinline__ float scale_of(const Smem<R, N>& sm, int slot, int row, int tile) {
  if (!((sm.valid[slot] >> row) & 1)) return 0.f;
  const uint8_t* at = sm.ring[slot] + row * Config<R, N>::kPitch + R::kScaleOffset;
  return *reinterpret_cast<const float*>(at + tile * 4);
}

// S^T of a warp's 16 rows, from Q as the caller stores it, into sm.y: 32 heads at a time, and no
// register of the loop around it more than it must.
template <class R, int N>
__device__ __noinline__ void exact_scores(Smem<R, N>& sm, const Args& p, int token, int slot) {
  Span sp = job<N>(p);  // again, rather than in registers of the loop around
  sp.token = token;
  constexpr int kEights = N / 8 < 4 ? N / 8 : 4;
  const int t = thread_here() & 127, quad = t & 3, r = (t & 31) >> 2;
  const uint8_t* rows = sm.ring[slot] + r * Config<R, N>::kPitch;
#pragma unroll 1
  for (int j0 = 0; j0 < N / 8; j0 += kEights) {
    float c[kEights][4] = {};
#pragma unroll 1
    for (int d = 0; d < R::kQk; d += 16) {
      const bool nope = d < R::kNope;
      uint32_t a[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {  // rows r, r + 8, r, r + 8; columns 2 quad, then 8 further on
        const uint8_t* row = rows + (k & 1) * 8 * Config<R, N>::kPitch;
        const int at = d + 2 * quad + (k & 2) * 4;
        if (nope) {
          const float s = scale_of(sm, slot, r + (k & 1) * 8, d / R::kTile);
          uint32_t lo, hi;
          e4m3x4(*reinterpret_cast<const uint16_t*>(row + at), lo, hi);
          a[k] = exact_pair(lo, s, s);
        } else {
          a[k] = *reinterpret_cast<const uint32_t*>(row + R::kRopeOffset + (at - R::kNope) * 2);
        }
      }
      const int64_t stride = nope ? p.q_head : p.qr_head;
      const bf16* q = (nope ? p.q + sp.token * p.q_token + d
                            : p.q_rope + sp.token * p.qr_token + (d - R::kNope)) +
                      (sp.head0 + 8 * j0 + r) * stride + 2 * quad;
#pragma unroll
      for (int j = 0; j < kEights; j++, q += 8 * stride) {
        uint32_t b0 = 0, b1 = 0;
        if (8 * (j0 + j) + r < sp.heads) {
          b0 = __ldg(reinterpret_cast<const uint32_t*>(q));
          b1 = __ldg(reinterpret_cast<const uint32_t*>(q + 8));
        }
        mma_bf16(c[j], a, b0, b1);
      }
    }
#pragma unroll
    for (int j = 0; j < kEights; j++)
      if (j0 + j < N / 8) sm.y[j0 + j][t] = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
  }
}

// O^T += V^T P^T of a block whose P is bf16, for the 256 columns of warpgroup g; frees its stages.
template <class R, int N>
__device__ __forceinline__ void exact_products(Smem<R, N>& sm, int slot, int g, uint32_t p_desc,
                                               float (&o)[4][N / 2]) {
  using K = Config<R, N>;
  static_assert(K::kExactly);
  const int tid = thread_here(), lane = tid & 31, w = (tid / 32) & 3, quad = lane & 3;
  const int row8 = ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch;
#pragma unroll 1
  for (int ks = 0; ks < 4; ks++) {
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const auto column = [&](int tile) { return g * 256 + sixteen<R, N>(w, tile) * 16; };
      uint32_t raw[4], f[4];  // of two tiles, of which m is one
      ldsm_t(raw, s32(sm.ring[slot]) + row8 + column((m & 2) + (lane >> 4)));
#pragma unroll
      for (int half = 0; half < 2; half++) {  // tokens 2 quad and the next, then 8 further on
        const int row = 2 * quad + 8 * half, tile = column(m) / R::kTile;
        uint32_t even, odd;
        e4m3x4(__byte_perm(raw[(m & 1) * 2 + half], 0, 0x3120), even, odd);
        const float s0 = scale_of(sm, slot, row, tile), s1 = scale_of(sm, slot, row + 1, tile);
        f[2 * half] = exact_pair(even, s0, s1);
        f[2 * half + 1] = exact_pair(odd, s0, s1);
      }
      wg_fence();
      wgmma_rs<N, true, 1>(o[m], f, fresh(p_desc + (ks * 2048 >> 4)), 1);
      wg_commit();
      wg_wait<0>();
    }
    __syncwarp();
    if (lane == 0) mb_arrive(&sm.empty[slot]);
    if (++slot == K::kStages) slot = 0;
  }
#pragma unroll
  for (int m = 0; m < 4; m++) hold(o[m]);
}

}  // namespace winnow::internal::attend::decode_sm90
