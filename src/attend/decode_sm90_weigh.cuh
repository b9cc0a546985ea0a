// Decode on Hopper: O^T += V^T P^T, the output, and the merge of a cluster's splits.
#pragma once

#include "attend/decode_sm90_layout.cuh"

namespace winnow::attention::sm90 {

// the statistics of head `h` of this CTA: writes lse and max_logit, returns what O is to be
// multiplied by
__device__ __forceinline__ float finish(const Args& p, int token, int h, float m, float sum,
                                        float top, bool write) {
  constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
  const bool some = sum > 0;
  if (h >= p.heads) return 0.f;
  if (write) {
    if (p.lse)
      p.lse[token * p.lse_token + h * p.lse_head] = some ? (log2f(sum) + m) * kLn2 : p.empty_lse;
    if (p.max_logit)
      p.max_logit[token * p.max_token + h * p.max_head] = some ? top * kLn2 : -INFINITY;
  }
  const float sink = p.sink ? ex2(p.sink[h] * kLog2e - m) : 0.f;
  return some ? 1.f / (sum + sink) : 0.f;
}

// O^T += V^T P^T for 256 of the 512 columns.
template <class R, int N, int G>
__device__ __forceinline__ void weigh(Smem<R, N>& sm, const Args& p, const Span& sp, int token,
                                      int head0) {
  using K = Config<R, N>;
  const int t = threadIdx.x & 127, lane = t & 31, w = t / 32, quad = lane & 3;
  float o[4][N / 2];
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) o[m][i] = 0;
  constexpr auto is8 = [](int m) { return R::kFp8 && (G * 4 + m) * 64 < R::kNope; };
  // lanes 0-7, 8-15, 16-23, 24-31 give the rows of the four 8x8 tiles
  const uint32_t off8 =
      ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + G * 256 + (lane >> 4) * 64 + w * 16;
  const uint32_t off16 =
      ((lane & 7) + 8 * (lane >> 4)) * K::kPitch + ((lane >> 3) & 1) * 16 + w * 32;
  int slot = 0, buf = 0;  // buf: i mod 3
#pragma unroll 1
  for (int i = 0; i < sp.blocks; i++) {
    mb_wait(&sm.pfull[i & 1], (i >> 1) & 1);
    if (sm.flag[buf]) {
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float2 al = *reinterpret_cast<const float2*>(&sm.alpha[buf][8 * j + 2 * quad]);
#pragma unroll
        for (int m = 0; m < 4; m++) {
          o[m][4 * j] *= al.x;
          o[m][4 * j + 1] *= al.y;
          o[m][4 * j + 2] *= al.x;
          o[m][4 * j + 3] *= al.y;
        }
      }
    }
    const uint32_t pd = desc(s32(sm.p[i & 1][0]), 8192);
    // eight half steps: 16 tokens x two 64-row tiles; the next half step's rows are read while this
    // one multiplies
    uint32_t raw[4], a[kWeighSets][2][4];
    auto load = [&](uint32_t base,
                    int hf) {  // fp8: both tiles of the half step; bf16 tiles are read when needed
      if (is8(2 * hf)) ldsm_t(raw, base + off8 + hf * 128);
    };
    load(s32(sm.ring[slot]), 0);
#pragma unroll
    for (int step = 0; step < 8; step++) {
      const int ks = step / 2, hf = step % 2;
      uint32_t(&f)[2][4] = a[step % kWeighSets];
#pragma unroll
      for (int k2 = 0; k2 < 2; k2++) {
        const int m = 2 * hf + k2;
        uint32_t lo = 0, hi = 0;
        if constexpr (R::kFp8) {
          const int k = (G * 4 + m) * 64 < R::kNope ? (G * 4 + m) * 64 / R::kTile : R::kScales;
          lo = *reinterpret_cast<const uint32_t*>(&sm.sc[buf][k][ks * 16 + 2 * quad]);
          hi = *reinterpret_cast<const uint32_t*>(&sm.sc[buf][k][ks * 16 + 2 * quad + 8]);
        }
        if (is8(m)) {
          const uint32_t u0 = __byte_perm(raw[k2 * 2], 0, 0x3120),
                         u1 = __byte_perm(raw[k2 * 2 + 1], 0, 0x3120);
          uint32_t e0, e1, e2, e3;
          e4m3x4(u0, e0, e1);
          e4m3x4(u1, e2, e3);
          f[k2][0] = mul_h2(e0, lo);
          f[k2][1] = mul_h2(e1, lo);
          f[k2][2] = mul_h2(e2, hi);
          f[k2][3] = mul_h2(e3, hi);
        } else {
          const int d = (G * 4 + m) * 64;
          ldsm_t(f[k2], s32(sm.ring[slot]) + off16 +
                            (R::kFp8 ? R::kRopeOffset + (d - R::kNope) * 2 : d * 2));
          if constexpr (R::kFp8) {
            f[k2][0] = mul_b2(f[k2][0], lo);
            f[k2][1] = mul_b2(f[k2][1], lo);
            f[k2][2] = mul_b2(f[k2][2], hi);
            f[k2][3] = mul_b2(f[k2][3], hi);
          }
        }
      }
      if (hf == 1) {
        __syncwarp();
        if (lane == 0) {  // the rows are in registers: the stage is free
          mb_arrive(&sm.empty[slot]);
        }
        if (++slot == K::kStages) slot = 0;
      }
      if (step < 7) load(s32(sm.ring[slot]), hf ^ 1);
      const uint32_t pk = fresh(pd + ((ks * 2048) >> 4));
      wg_fence();
#pragma unroll
      for (int k2 = 0; k2 < 2; k2++) {
        const int m = 2 * hf + k2;
        if (is8(m)) wgmma_rs<N, false, 1>(o[m], f[k2], pk, 1);
        else wgmma_rs<N, true, 1>(o[m], f[k2], pk + (K::kRopeInV ? 8192 >> 4 : 0), 1);
      }
      wg_commit();
      if (step < 7) wg_wait<kWeighSets - 1>();
    }
    wg_wait<0>();
#pragma unroll
    for (int m = 0; m < 4; m++) hold(o[m]);
    mb_arrive(&sm.pempty[i & 1]);
    if (++buf == 3) buf = 0;
  }
  bar<3, K::kMath>();
  // fp8 tiles hold dims 2i and 2i+1 of a warp's 16 in rows i and i+8, bf16 tiles dims i and i+8
  if (p.splits == 1) {
    uint8_t* tile = sm.ring[0];
    constexpr int kRow = 1040;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float2 f = *reinterpret_cast<const float2*>(&sm.factor[8 * j + 2 * quad]);
#pragma unroll
      for (int m = 0; m < 4; m++) {
        uint8_t* at = tile + (8 * j + 2 * quad) * kRow + ((G * 4 + m) * 64 + w * 16) * 2;
        const uint32_t x = pack<true>(o[m][4 * j] * f.x, o[m][4 * j + 2] * f.x),
                       y = pack<true>(o[m][4 * j + 1] * f.y, o[m][4 * j + 3] * f.y);
        if (is8(m)) {
          *reinterpret_cast<uint32_t*>(at + (lane >> 2) * 4) = x;
          *reinterpret_cast<uint32_t*>(at + kRow + (lane >> 2) * 4) = y;
        } else {
          uint16_t* b = reinterpret_cast<uint16_t*>(at) + (lane >> 2);
          b[0] = x & 0xffff;
          b[8] = x >> 16;
          b[kRow / 2] = y & 0xffff;
          b[kRow / 2 + 8] = y >> 16;
        }
      }
    }
    bar<4, 256>();
    const int warp = G * 4 + w;
    for (int h = warp; h < N && head0 + h < p.heads; h += 8) {
      uint4* dst = reinterpret_cast<uint4*>(p.out + (int64_t)token * p.out_token +
                                            (int64_t)(head0 + h) * p.out_head);
      const uint4* src = reinterpret_cast<const uint4*>(tile + h * kRow);
      const uint4 x = src[lane], y = src[lane + 32];
      dst[lane] = x;
      dst[lane + 32] = y;
    }
  } else {  // fp32 partial output over the dead Q, P and rows: 512 bytes a unit of 16 x 8 outputs
            // per warp
    float4* part = reinterpret_cast<float4*>(sm.q);
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int j = 0; j < N / 8; j++)
        part[((G * 4 + m) * (N / 8) + j) * 128 + t] =
            make_float4(o[m][4 * j], o[m][4 * j + 1], o[m][4 * j + 2], o[m][4 * j + 3]);
  }
}

// Each CTA of the cluster sums its share of the output, in the order of the splits.

template <class R, int N>
__device__ __forceinline__ void merge(Smem<R, N>& sm, const Args& p, int token, int split,
                                      int head0) {
  using K = Config<R, N>;
  const int tid = threadIdx.x, S = p.splits;
  static_assert(sizeof(sm.q) + sizeof(sm.p) + sizeof(sm.ring) >= N * 2048 + 16 * N * 4);
  float* weight = reinterpret_cast<float*>(sm.q + N * 2048);  // [split][head]
  if (tid < N) {
    float big = -INFINITY, sum = 0, top = -INFINITY, ms[16], ls[16];
#pragma unroll
    for (int s = 0; s < 16; s++)
      if (s < S) {
        ms[s] = peer_f32(peer(s32(&sm.m[tid]), s));
        ls[s] = peer_f32(peer(s32(&sm.sum[tid]), s));
        top = fmaxf(top, peer_f32(peer(s32(&sm.top[tid]), s)));
      }
#pragma unroll
    for (int s = 0; s < 16; s++)
      if (s < S && ls[s] > 0) big = fmaxf(big, ms[s]);
#pragma unroll
    for (int s = 0; s < 16; s++)
      if (s < S) {
        ms[s] = ls[s] > 0 ? ex2(ms[s] - big) : 0.f;
        sum += ls[s] * ms[s];
      }
    const float f = finish(p, token, head0 + tid, big, sum, top, split == 0);
#pragma unroll
    for (int s = 0; s < 16; s++)
      if (s < S) weight[s * N + tid] = ms[s] * f;
  }
  bar<3, K::kMath>();
  const int t = tid & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  const uint32_t part = s32(sm.q) + t * 16;
  for (int u = split + S * (tid / 128); u < N; u += S * 3) {
    const int tile = u / (N / 8), j = u % (N / 8), hl = 8 * j + 2 * quad;
    float4 acc = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int s = 0; s < S; s++) {
      const float4 x = peer_f32x4(peer(part + u * 2048, s));
      const float2 f = *reinterpret_cast<const float2*>(&weight[s * N + hl]);
      acc.x += x.x * f.x;
      acc.y += x.y * f.y;
      acc.z += x.z * f.x;
      acc.w += x.w * f.y;
    }
    const bool fp8 = R::kFp8 && tile * 64 < R::kNope;
    const int d0 = tile * 64 + w * 16 + (fp8 ? 2 * r : r);
    bf16* dst = p.out + (int64_t)token * p.out_token + (int64_t)(head0 + hl) * p.out_head + d0;
    const uint32_t a = pack<true>(acc.x, acc.z), b = pack<true>(acc.y, acc.w);
    if (head0 + hl < p.heads) {
      if (fp8) {
        *reinterpret_cast<uint32_t*>(dst) = a;
      } else {
        reinterpret_cast<uint16_t*>(dst)[0] = a & 0xffff;
        reinterpret_cast<uint16_t*>(dst)[8] = a >> 16;
      }
    }
    dst += p.out_head;
    if (head0 + hl + 1 < p.heads) {
      if (fp8) {
        *reinterpret_cast<uint32_t*>(dst) = b;
      } else {
        reinterpret_cast<uint16_t*>(dst)[0] = b & 0xffff;
        reinterpret_cast<uint16_t*>(dst)[8] = b >> 16;
      }
    }
  }
}

}  // namespace winnow::attention::sm90
