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

// What a split's CTA receives from all: partial sums, and statistics after them. A unit has two
// tiles of 64 columns, of which two warps hold 32 each, and eight heads: N units in all. Unit u is
// added up by CTA u mod splits, and lies at u / splits.
template <class R, int N>
struct Received {
  uint4 units[N + 16]
             [64];     // as the threads send them: a pair of columns a word, two heads, two tiles
  float4 stat[16][N];  // reference, sum, largest logit of a split's heads
  float weight[16][N];
  static_assert(sizeof(Smem<R, N>::q) + sizeof(Smem<R, N>::p) + sizeof(Smem<R, N>::y) +
                    sizeof(Smem<R, N>::ring) >=
                (N + 16) * 1024 + 16 * N * 20);
};

// Bytes of the units that reach CTA `split` from the others.
template <int N>
__device__ __forceinline__ uint32_t received_units(const Args& p, unsigned split) {
  const unsigned splits = p.splits;
  return (splits - 1) * (over_splits(p, N - split + splits - 1) * 1024);
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
  const int t = tid & 63, quad = t & 3, r = (t & 31) >> 2;
  const int count = static_cast<int>(over_splits(p, N - split + S - 1));
  // Two units, four splits at once: their loads are what there is to wait for, so that they are all
  // made, of others where there are none.
#pragma unroll 1
  for (int k = tid / 64; k < count; k += 12) {
    float acc[2][8] = {};
    const int next = k + 6 < count ? k + 6 : k;
    const uint4* x[2] = {&in.units[k * S][t], &in.units[next * S][t]};
    const int eight[2] = {(k * S + split) / 2 % (N / 8), (next * S + split) / 2 % (N / 8)};
#pragma unroll 1
    for (int s0 = 0; s0 < S; s0 += 4) {
      uint4 v[2][4];
      float2 f[2][4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int s = min(s0 + j, S - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          v[i][j] = x[i][s * 64];
          f[i][j] = *reinterpret_cast<const float2*>(&in.weight[s][8 * eight[i] + 2 * quad]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (s0 + j < S)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint32_t word[4] = {v[i][j].x, v[i][j].y, v[i][j].z, v[i][j].w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
              const float by = c & 1 ? f[i][j].y : f[i][j].x;
              acc[i][2 * c] += __uint_as_float(word[c] << 16) * by;
              acc[i][2 * c + 1] += __uint_as_float(word[c] & 0xffff0000) * by;
            }
          }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (k + 6 * i >= count) break;
      const int u = (k + 6 * i) * S + split, hl = 8 * eight[i] + 2 * quad;
      const int w = u % 2 * 2 + t / 32, tile0 = u / 2 / (N / 8) * 2;
#pragma unroll
      for (int c = 0; c < 4; c++) {  // tile c / 2, head c % 2
        if (hl + c % 2 >= sp.heads) continue;
        const int tile = tile0 + c / 2;
        const uint32_t a = pack<true>(acc[i][2 * c], acc[i][2 * c + 1]);
        const bool fp8 = R::kFp8 && tile * 64 < R::kNope;
        bf16* dst = out + (hl + c % 2) * p.out_head + tile * 64 + w * 16 + (fp8 ? 2 * r : r);
        if (fp8) {
          *reinterpret_cast<uint32_t*>(dst) = a;
        } else {
          reinterpret_cast<uint16_t*>(dst)[0] = a & 0xffff;
          reinterpret_cast<uint16_t*>(dst)[8] = a >> 16;
        }
      }
    }
  }
}

}  // namespace winnow::attention::sm90
