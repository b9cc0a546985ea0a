// Decode on Hopper: the merge of splits that are no cluster, through global memory that stays in
// the L2. Clusters leave multiprocessors idle: 15 of 8 CTAs run at once on 132 of them.
//
// All CTAs run at once (a cooperative launch). A CTA stores the units of its sums and then its
// statistics, no word of which is kEmpty: who waits reads until it finds something else. That
// memory holds anything before a launch, and a replayed graph has the same arguments and grid
// number each time; so each CTA empties its statistics first, and sends when all of its token and
// heads have done so. They tell each other while rows are on their way, by numbers that no launch
// has used before.
#pragma once

#include "attend/decode_sm90_merge.cuh"

namespace winnow::attention::sm90 {

constexpr uint32_t kEmpty = ~0u;

// Of the splits of a token's N heads. Behind it: units[N][splits][64] of uint4, as in Received.
template <int N>
struct Exchange {
  uint64_t number[kMaxExchanged];                // each split's own
  uint64_t reply[kMaxExchanged][kMaxExchanged];  // to a split, from each: the number read of it
  float4 stat[kMaxExchanged][N];                 // reference, sum, largest logit, unused
};
static_assert(sizeof(Exchange<8>) == exchange_bytes(8, 0));

template <int N>
__device__ __forceinline__ Exchange<N>* exchange_of(const Args& p, const Span& sp) {
  const int64_t group = static_cast<int64_t>(sp.token) * p.groups + sp.head0 / N;
  return reinterpret_cast<Exchange<N>*>(p.exchange + group * exchange_bytes(N, p.splits));
}
template <int N>
__device__ __forceinline__ uint4* units_of(Exchange<N>* x) {
  return reinterpret_cast<uint4*>(x + 1);
}

// Words that other CTAs read or write at the same time.
__device__ __forceinline__ void put(uint64_t* at, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(at), "l"(x) : "memory");
}
__device__ __forceinline__ uint64_t get(const uint64_t* at) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void put(void* at, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(at), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ uint4 get(const void* at) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ uint32_t largest_word(uint4 x) {  // kEmpty: some of it is not there yet
  return max(max(x.x, x.y), max(x.z, x.w));
}

// A warp that has nothing left to copy empties the statistics and hears of the others that they
// have, a split a lane. Who reads its own number in a reply knows that the other CTA runs and is
// ready, and that the other's number can be read now. (By a warp that is still needed it would
// cost more: a fence waits for all rows that are on their way, up to 6,000 cycles.)
template <class R, int N>
__device__ __forceinline__ void open(Smem<R, N>& sm, const Args& p, const Span& sp) {
  const int lane = thread_here() & 31, split = split_here(p);
  Exchange<N>* x = exchange_of<N>(p, sp);
  uint64_t mine;
  asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(mine));
  mine = __shfl_sync(~0u, mine << 16 | (clock64() & 0xfffe) | 1, 0);
  if (lane == 0) put(&x->number[split], mine);
  for (int h = lane; h < N; h += 32)
    put(&x->stat[split][h], make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  __syncwarp();
  __threadfence();
  if (lane < p.splits && lane != split) {
    uint64_t told = 0, theirs, back;
    do {
      theirs = get(&x->number[lane]);
      back = get(&x->reply[split][lane]);
      if (theirs != told) put(&x->reply[lane][split], told = theirs);
    } while (back != mine);
    __threadfence();
    theirs = get(&x->number[lane]);
    if (theirs != told) put(&x->reply[lane][split], theirs);
  }
  __syncwarp();
  if (lane == 0) mb_arrive(&sm.open);
}

// The weigh warpgroups store their sums, then the statistics.
template <class R, int N>
__device__ __forceinline__ void send_exchanged(Smem<R, N>& sm, const Args& p, const Span& sp,
                                               const float (&o)[4][N / 2]) {
  const int tid = thread_here(), g = tid / 128, w = tid / 32 & 3, split = split_here(p);
  Exchange<N>* x = exchange_of<N>(p, sp);
  uint4* to = units_of(x) + ((g * (N / 2) + w / 2) * p.splits + split) * 64 + (tid & 63);
#pragma unroll
  for (int m = 0; m < 4; m += 2)
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      *to = unit_of<N>(o, m, j);
      to += 2 * 64 * p.splits;
    }
  mb_wait(&sm.open, 0);
  bar<4, 256>();
  if (tid < N) {
    __threadfence();  // all of the CTA's sums
    const float sum = sm.sum[tid];
    put(&x->stat[split][tid],
        make_uint4(__float_as_uint(sm.m[tid]), sum == sum ? __float_as_uint(sum) : 0x7fffffff,
                   __float_as_uint(sm.top[tid]), 0));
  }
}

// The score warpgroup waits until every split has sent, then makes the weights: two lanes
// have eight splits of a head each.
template <class R, int N>
__device__ __forceinline__ void exchanged_weights(Smem<R, N>& sm, const Args& p, const Span& sp) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int t = thread_here() & 127, h = min(t / 2, N - 1), s0 = 8 * (t & 1), S = p.splits;
  const float4* stat = &exchange_of<N>(p, sp)->stat[0][0];
  touch(p.lse, p.sink);
  mb_wait(&sm.open, 0);
  if (t < S) {
    while (largest_word(get(stat + t * N)) == kEmpty) {
    }
    __threadfence();
  }
  __syncwarp();
  meet<3, Config<R, N>::kMath>();
  uint4 v[8];
  uint32_t worst;
  do {
    worst = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = get(stat + min(s0 + j, S - 1) * N + h);
#pragma unroll
    for (int j = 0; j < 8; j++) worst = max(worst, largest_word(v[j]));
  } while (worst == kEmpty);
  __syncwarp();
  float m[8], sum[8], big = -INFINITY, top = -INFINITY, all = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    m[j] = __uint_as_float(v[j].x);
    sum[j] = s0 + j < S ? __uint_as_float(v[j].y) : 0.f;
    if (sum[j] != 0) big = fmaxf(big, m[j]);
    top = fmaxf(top, __uint_as_float(v[j].z));
  }
  big = fmaxf(big, __shfl_xor_sync(~0u, big, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
#pragma unroll
  for (int j = 0; j < 8; j++) {
    m[j] = sum[j] != 0 ? ex2(m[j] - big) : 0.f;
    all = fmaf(sum[j], m[j], all);
  }
  all += __shfl_xor_sync(~0u, all, 1);
  const bool write = blockIdx.x == sp.head0 / N * S && t < 2 * N && s0 == 0;  // the first split's
  const float f = finish(p, sp.token, sp.head0 + h, big, all, top, write);
#pragma unroll
  for (int j = 0; j < 8; j++) in.weight[s0 + j][h] = m[j] * f;
}

// The weigh warpgroups fetch the parts of this CTA's units, 64 threads a part.
template <class R, int N>
__device__ __forceinline__ void fetch(Smem<R, N>& sm, const Args& p, const Span& sp) {
  auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
  const int tid = thread_here(), t = tid & 63, S = p.splits, split = split_here(p);
  const uint4* units = units_of(exchange_of<N>(p, sp)) + t;
  const int parts = static_cast<int>(over_splits(p, N - split + S - 1)) * S;
  const auto from = [&](int i) {  // part i lies at i in shared memory
    const int k = static_cast<int>(over_splits(p, i));
    return units + ((k * S + split) * S + (i - k * S)) * 64;
  };
  meet<3, Config<R, N>::kMath>();  // every split has sent
#pragma unroll 4
  for (int i = tid / 64; i < parts; i += 4)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(s32(&in.units[i][t])), "l"(from(i))
                 : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace winnow::attention::sm90
