// Decode on Hopper: the statistics of a head, and the merge of a cluster's splits.
#pragma once

#include <cfloat>

#include "attend/decode_sm90_layout.cuh"

namespace winnow::attention::sm90 {

// the statistics of head `h` of this CTA: writes lse and max_logit, returns what O is to be
// multiplied by
__device__ __forceinline__ float finish(const Args& p, int token, int h, float m, float sum,
                                        float top, bool write) {
  constexpr float kLn2 = 0.693147180559945f;
  const bool some = sum != 0, nan = sum != sum;
  if (h >= p.heads) return 0.f;
  if (write) {  // m stays finite when a logit is +inf, and `top` passes a NaN over
    const float lse = m == FLT_MAX && !nan ? INFINITY : (log2f(sum) + m) * kLn2;
    if (p.lse) p.lse[token * p.lse_token + h * p.lse_head] = some ? lse : p.empty_lse;
    if (p.max_logit)
      p.max_logit[token * p.max_token + h * p.max_head] = nan ? sum : some ? top * kLn2 : -INFINITY;
  }
  const float sink = p.sink ? ex2(p.sink[h] * kLog2e - m) : 0.f;
  return some ? 1.f / (sum + sink) : 0.f;
}

// What a split's CTA receives from all: partial sums, and these statistics after them.
template <class R, int N>
struct Received {
  float4 units[N + 16][128];
  float m[16][N], sum[16][N], top[16][N], weight[16][N];
  static_assert(sizeof(Smem<R, N>::q) + sizeof(Smem<R, N>::p) + sizeof(Smem<R, N>::y) +
                    sizeof(Smem<R, N>::ring) >=
                (N + 16) * 2048 + 16 * N * 16);
};

// Bytes that reach CTA `split`: its units of the others, the statistics of all heads of all.
template <int N>
__device__ __forceinline__ uint32_t received_bytes(unsigned split, unsigned splits) {
  return (splits - 1) * ((N - split + splits - 1) / splits * 2048) + splits * (N * 12);
}

// The score warpgroup sends its statistics to every CTA of the cluster.
template <class R, int N>
__device__ __forceinline__ void send_statistics(Smem<R, N>& sm, int split, int splits) {
  auto& at = *reinterpret_cast<Received<R, N>*>(sm.q);
#pragma unroll 1
  for (int i = thread_here() & 127; i < splits * N; i += 128) {
    const int s = i / N, h = i % N;
    const uint32_t inbox = peer(s32(&sm.inbox), s);
    peer_put(peer(s32(&at.m[split][h]), s), sm.m[h], inbox);
    peer_put(peer(s32(&at.sum[split][h]), s), sm.sum[h], inbox);
    peer_put(peer(s32(&at.top[split][h]), s), sm.top[h], inbox);
  }
}

// Each CTA of the cluster sums its share of the output, in the order of the splits.
template <class R, int N>
__device__ __forceinline__ void merge(Smem<R, N>& sm, const Args& p, const Span& sp, int split) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int tid = thread_here(), S = p.splits;
  mb_wait_cluster(&sm.inbox, 0);
  if (tid < N) {
    float big = -INFINITY, sum = 0, top = -INFINITY;
#pragma unroll 4
    for (int s = 0; s < S; s++) {
      if (in.sum[s][tid] != 0) big = fmaxf(big, in.m[s][tid]);
      top = fmaxf(top, in.top[s][tid]);
    }
#pragma unroll 4
    for (int s = 0; s < S; s++) {
      const float x = in.sum[s][tid], w = x != 0 ? ex2(in.m[s][tid] - big) : 0.f;
      sum += x * w;
      in.weight[s][tid] = w;
    }
    sm.factor[tid] = finish(p, sp.token, sp.head0 + tid, big, sum, top, split == 0);
  }
  meet<3, Config<R, N>::kMath>();
  const int t = tid & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  // Four units at once: their loads are what there is to wait for.
  constexpr int kUnits = N < 32 ? 2 : 4;
  const int count = (N - split + S - 1) / S;
#pragma unroll 1
  for (int k = tid / 128; k < count; k += 3 * kUnits) {
    float4 acc[kUnits] = {};
#pragma unroll 2
    for (int s = 0; s < S; s++)
#pragma unroll
      for (int i = 0; i < kUnits; i++) {
        const int unit = k + 3 * i, hl = 8 * ((unit * S + split) % (N / 8)) + 2 * quad;
        if (unit >= count) continue;
        const float4 x = in.units[unit * S + s][t];
        const float2 f = *reinterpret_cast<const float2*>(&in.weight[s][hl]);
        acc[i].x += x.x * f.x;
        acc[i].y += x.y * f.y;
        acc[i].z += x.z * f.x;
        acc[i].w += x.w * f.y;
      }
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      const int u = (k + 3 * i) * S + split, tile = u / (N / 8), hl = 8 * (u % (N / 8)) + 2 * quad;
      if (k + 3 * i >= count) break;
      const float2 f = *reinterpret_cast<const float2*>(&sm.factor[hl]);
      const uint32_t a[2] = {pack<true>(acc[i].x * f.x, acc[i].z * f.x),
                             pack<true>(acc[i].y * f.y, acc[i].w * f.y)};
      const bool fp8 = R::kFp8 && tile * 64 < R::kNope;
      const int d0 = tile * 64 + w * 16 + (fp8 ? 2 * r : r);
      bf16* dst =
          p.out + (int64_t)sp.token * p.out_token + (int64_t)(sp.head0 + hl) * p.out_head + d0;
#pragma unroll
      for (int h = 0; h < 2; h++, dst += p.out_head) {
        if (hl + h >= sp.heads) break;
        if (fp8) {
          *reinterpret_cast<uint32_t*>(dst) = a[h];
        } else {
          reinterpret_cast<uint16_t*>(dst)[0] = a[h] & 0xffff;
          reinterpret_cast<uint16_t*>(dst)[8] = a[h] >> 16;
        }
      }
    }
  }
}

}  // namespace winnow::attention::sm90
