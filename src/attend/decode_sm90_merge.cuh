// Decode on Hopper: the statistics of a head, and the merge of a cluster's splits.
#pragma once

#include <cfloat>

#include "attend/decode_sm90_layout.cuh"

namespace winnow::attention::sm90 {

// Has two arguments read here: a launch finds them in no cache, and what follows is a wait anyway.
__device__ __forceinline__ void touch(const void* a, const void* b) {
  asm volatile("" ::"l"(a), "l"(b) : "memory");
}

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

// What a split's CTA receives from all: partial sums, and statistics after them.
template <class R, int N>
struct Received {
  float4 units[N + 16][128];
  float4 stat[16][N];  // reference, sum, largest logit of a split's heads
  float weight[16][N];
  static_assert(sizeof(Smem<R, N>::q) + sizeof(Smem<R, N>::p) + sizeof(Smem<R, N>::y) +
                    sizeof(Smem<R, N>::ring) >=
                (N + 16) * 2048 + 16 * N * 20);
};

// Bytes of the units that reach CTA `split` from the others.
template <int N>
__device__ __forceinline__ uint32_t received_units(const Args& p, unsigned split) {
  const unsigned splits = p.splits;
  return (splits - 1) * (over_splits(p, N - split + splits - 1) * 2048);
}

// The weigh warpgroups send the statistics to every CTA of the cluster, before their units.
template <class R, int N>
__device__ __forceinline__ void send_statistics(Smem<R, N>& sm, int split, int splits) {
  auto& at = *reinterpret_cast<Received<R, N>*>(sm.q);
#pragma unroll 1
  for (int i = thread_here(); i < splits * N; i += 256) {
    const int s = i / N, h = i % N;
    peer_put(peer(s32(&at.stat[split][h]), s), make_float4(sm.m[h], sm.sum[h], sm.top[h], 0.f),
             peer(s32(&sm.notes), s));
  }
}

// While units travel, the score warpgroup makes what each split's sums are multiplied by: 16 lanes
// have the splits of a head.
template <class R, int N>
__device__ __forceinline__ void make_weights(Smem<R, N>& sm, const Args& p, const Span& sp,
                                             int split) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int t = thread_here() & 127, s = t & 15;
  touch(p.lse, p.sink);
  mb_wait_cluster(&sm.notes, 0);
#pragma unroll 2
  for (int h = t / 16; h < N; h += 8) {
    float4 x = make_float4(0.f, 0.f, -INFINITY, 0.f);
    if (s < p.splits) x = in.stat[s][h];
    float big = x.y != 0 ? x.x : -INFINITY, top = x.z;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      big = fmaxf(big, __shfl_xor_sync(~0u, big, d));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    }
    const float w = x.y != 0 ? ex2(x.x - big) : 0.f;
    float sum = x.y * w;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float f = finish(p, sp.token, sp.head0 + h, big, sum, top, split == 0 && s == 0);
    in.weight[s][h] = w * f;
  }
}

// Each CTA of the cluster sums its share of the output, in the order of the splits.
template <class R, int N>
__device__ __forceinline__ void merge(Smem<R, N>& sm, const Args& p, const Span& sp, int split) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int tid = thread_here(), S = p.splits;
  bf16* const out = p.out + (int64_t)sp.token * p.out_token + (int64_t)sp.head0 * p.out_head;
  touch(out, reinterpret_cast<const void*>(p.out_head));
  mb_wait_cluster(&sm.inbox, 0);
  meet<3, Config<R, N>::kMath>();  // the weights are there
  const int t = tid & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  const int count = static_cast<int>(over_splits(p, N - split + S - 1));
  // Two units, four splits at once: their loads are what there is to wait for, so that they are all
  // made, of others where there are none.
#pragma unroll 1
  for (int k = tid / 128; k < count; k += 6) {
    float4 acc[2] = {};
    const bool two = k + 3 < count;
    const float4* x[2] = {&in.units[k * S][t], &in.units[two ? (k + 3) * S : 0][t]};
    const int eight[2] = {(k * S + split) % (N / 8), ((k + 3) * S + split) % (N / 8)};
#pragma unroll 1
    for (int s0 = 0; s0 < S; s0 += 4) {
      float4 v[2][4];
      float2 f[2][4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int s = min(s0 + j, S - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          v[i][j] = x[i][s * 128];
          f[i][j] = *reinterpret_cast<const float2*>(&in.weight[s][8 * eight[i] + 2 * quad]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (s0 + j < S)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            acc[i].x += v[i][j].x * f[i][j].x;
            acc[i].y += v[i][j].y * f[i][j].y;
            acc[i].z += v[i][j].z * f[i][j].x;
            acc[i].w += v[i][j].w * f[i][j].y;
          }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int u = (k + 3 * i) * S + split, tile = u / (N / 8), hl = 8 * (u % (N / 8)) + 2 * quad;
      if (k + 3 * i >= count) break;
      const uint32_t a[2] = {pack<true>(acc[i].x, acc[i].z), pack<true>(acc[i].y, acc[i].w)};
      const bool fp8 = R::kFp8 && tile * 64 < R::kNope;
      bf16* dst = out + hl * p.out_head + tile * 64 + w * 16 + (fp8 ? 2 * r : r);
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
