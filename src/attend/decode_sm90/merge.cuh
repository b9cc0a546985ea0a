// Decode on Hopper: the statistics of a head, and the merge of a cluster's splits.
#pragma once

#include <cfloat>

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

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
// tiles of two warps, 64 columns, and eight heads: N units in all. Unit u is
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

// A thread's part of a unit: tiles m and m + 1 of its sums, as bf16.
template <int N>
__device__ __forceinline__ uint4 unit_of(const float (&o)[4][N / 2], int m, int j) {
  const auto two = [&](int tile, int c) {
    return pack<true>(o[tile][4 * j + c], o[tile][4 * j + c + 2]);
  };
  return make_uint4(two(m, 0), two(m, 1), two(m + 1, 0), two(m + 1, 1));
}

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

// What the sums of a split are multiplied by: 16 lanes have the statistics x of a head's splits.
__device__ __forceinline__ float weight_of(const Args& p, const Span& sp, int h, float4 x,
                                           bool write) {
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
  return w * finish(p, sp.token, sp.head0 + h, big, sum, top, write);
}

// While units travel, the score warpgroup makes the weights.
template <class R, int N>
__device__ __forceinline__ void make_weights(Smem<R, N>& sm, const Args& p, const Span& sp,
                                             int split) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int t = thread_here() & 127, s = t & 15;
  touch(p.lse, p.sink);
  mb_wait_cluster(&sm.notes, 0);
#pragma unroll 1
  for (int h = t / 16; h < N; h += 8) {
    float4 x = make_float4(0.f, 0.f, -INFINITY, 0.f);
    if (s < p.splits) x = in.stat[s][h];
    in.weight[s][h] = weight_of(p, sp, h, x, split == 0 && s == 0);
  }
  meet<3, Config<R, N>::kMath>();
}

// A split's part of two columns of two heads, times the heads' weights.
__device__ __forceinline__ void add_part(float (&acc)[4], uint32_t x, uint32_t y, float2 by) {
  acc[0] = fmaf(__uint_as_float(x << 16), by.x, acc[0]);
  acc[1] = fmaf(__uint_as_float(x & 0xffff0000), by.x, acc[1]);
  acc[2] = fmaf(__uint_as_float(y << 16), by.y, acc[2]);
  acc[3] = fmaf(__uint_as_float(y & 0xffff0000), by.y, acc[3]);
}

// The i-th of the 128 halves of unit u, two columns of two heads, as the output.
template <class R, int N>
__device__ __forceinline__ void put_merged(const Args& p, const Span& sp, int u, int i,
                                           const float (&acc)[4]) {
  const int t = i / 2, hl = 8 * (u / 2 % (N / 8)) + 2 * (t & 3);
  const int w = u % 2 * 2 + t / 32, tile = u / 2 / (N / 8) * 2 + (i & 1), r = (t & 31) >> 2;
  const int d = tile / 4 * 256 + sixteen<R, N>(w, tile % 4) * 16;
  const bool fp8 = R::kFp8 && (R::kNope >= R::kV || d < R::kNope);
  bf16* dst = p.out + (int64_t)sp.token * p.out_token + (int64_t)(sp.head0 + hl) * p.out_head + d +
              (fp8 ? 2 * r : r);
#pragma unroll
  for (int c = 0; c < 2; c++, dst += p.out_head) {
    if (hl + c >= sp.heads) break;
    const uint32_t a = pack<true>(acc[2 * c], acc[2 * c + 1]);
    if (fp8) {
      *reinterpret_cast<uint32_t*>(dst) = a;
    } else {
      reinterpret_cast<uint16_t*>(dst)[0] = a & 0xffff;
      reinterpret_cast<uint16_t*>(dst)[8] = a >> 16;
    }
  }
}

// The weigh warpgroups sum the CTA's share of the output, in the order of the splits.
template <class R, int N>
__device__ __forceinline__ void merge(Smem<R, N>& sm, const Args& p, const Span& sp, int split) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int tid = thread_here(), S = p.splits;
  touch(p.out, reinterpret_cast<const void*>(p.out_head));
  mb_wait_cluster(&sm.inbox, 0);
  meet<3, Config<R, N>::kMath>();  // the weights are there
  const int count = static_cast<int>(over_splits(p, N - split + S - 1));
  // A thread has two columns of two heads. The loop is short, since its code is in no cache.
#pragma unroll 1
  for (int i = tid; i < count * 128; i += 256) {
    const int k = i / 128, t = i / 2 & 63, u = k * S + split;
    const uint2* x = reinterpret_cast<const uint2*>(in.units[k * S]) + (i & 127);
    const float* by = &in.weight[0][8 * (u / 2 % (N / 8)) + 2 * (t & 3)];
    float acc[4] = {};
#pragma unroll 4
    for (int s = 0; s < S; s++, x += 128, by += N)
      add_part(acc, x->x, x->y, *reinterpret_cast<const float2*>(by));
    put_merged<R, N>(p, sp, u, i & 127, acc);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
