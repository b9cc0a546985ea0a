// Decode on Hopper: merges splits that are no cluster, through global memory that stays in the L2.
// Clusters of 8 CTAs leave multiprocessors idle: 15 clusters fit on 132 of them.
//
// All CTAs run at once (a cooperative launch). Each CTA draws a fresh launch id and exchanges it
// with its peers. It fills its output slots with a NaN sentinel, while rows are being copied and
// scores computed, then publishes the id. Readers poll until no sentinel remains, so no fence or
// flag follows the sums. Nothing is cleared before the launch: the memory may hold anything, also
// when a graph is replayed with the same arguments and grid id.
#pragma once

#include "attend/decode_sm90/merge.cuh"

namespace winnow::internal::attend::decode_sm90 {

// What a split tells another: the other's number as it reads it, and its own.
struct alignas(16) Reply {
  uint64_t yours, mine;
};
// Of the splits of a token's N heads. Behind it: units[N][splits][64] of uint4, as in Received.
template <int N>
struct Exchange {
  uint64_t number[kMaxExchanged];             // each split's own
  Reply reply[kMaxExchanged][kMaxExchanged];  // to a split, from each
  struct alignas(128) {                       // a line that is written once
    uint64_t number;
  } marked[kMaxExchanged];        // each split's own when its place is marked
  float4 stat[kMaxExchanged][N];  // reference, sum, largest logit, unused
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
__device__ __forceinline__ uint4 get(const void* at) {
  uint4 x;
  asm volatile(
      "{\n.reg .b64 a,b;\n.reg .b128 t;\nld.relaxed.gpu.global.b128 t,[%4];\nmov.b128 {a,b},t;\n"
      "mov.b64 {%0,%1},a;\nmov.b64 {%2,%3},b;\n}"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(at)
      : "memory");
  return x;
}
__device__ __forceinline__ void get(const void* at, uint32_t (&x)[4]) {
  const uint4 v = get(at);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void get(const void* at, uint32_t (&x)[2]) {
  const uint64_t v = get(static_cast<const uint64_t*>(at));
  x[0] = static_cast<uint32_t>(v), x[1] = static_cast<uint32_t>(v >> 32);
}
// Both numbers of a reply at once.
__device__ __forceinline__ void put(Reply* at, Reply x) {
  asm volatile(
      "{\n.reg .b128 t;\nmov.b128 t,{%1,%2};\nst.relaxed.gpu.global.b128 [%0],t;\n}" ::"l"(at),
      "l"(x.yours), "l"(x.mine)
      : "memory");
}
__device__ __forceinline__ Reply get(const Reply* at) {
  Reply x;
  asm volatile("{\n.reg .b128 t;\nld.relaxed.gpu.global.b128 t,[%2];\nmov.b128 {%0,%1},t;\n}"
               : "=l"(x.yours), "=l"(x.mine)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ void put(void* at, uint4 x) {
  asm volatile(
      "{\n.reg .b64 a,b;\n.reg .b128 t;\nmov.b64 a,{%1,%2};\nmov.b64 b,{%3,%4};\n"
      "mov.b128 t,{a,b};\nst.relaxed.gpu.global.b128 [%0],t;\n}" ::"l"(at),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}

// A warp that has nothing left to copy learns the others' numbers, a split a lane, while rows are
// on their way. A number that is read too early is an old one; but a reply that has this CTA's
// number is of this launch, and has the other's. Then the warp tells the others when this CTA's
// place is marked, and hears of them that theirs is. (Replies in place of `marked`, a line that all
// others write while it is read, took 1,500 cycles more.)
template <class R, int N>
__device__ __forceinline__ void open(Smem<R, N>& sm, const Args& p, const Span& sp) {
  const int lane = thread_here() & 31, split = split_here(p);
  Exchange<N>* x = exchange_of<N>(p, sp);
  uint64_t mine, told = 0;
  asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(mine));
  mine = __shfl_sync(~0u, mine << 16 | (clock64() & 0xfffe) | 1, 0);
  if (lane == 0) put(&x->number[split], mine);
  const bool other = lane < p.splits && lane != split;
  Reply back{};
  for (bool done = !other; !done; done = back.yours == mine) {
    const uint64_t theirs = get(&x->number[lane]);
    back = get(&x->reply[split][lane]);
    if (theirs != told) put(&x->reply[lane][split], {told = theirs, mine});
  }
  if (other && back.mine != told) put(&x->reply[lane][split], {back.mine, mine});
  __syncwarp();
  mb_wait(&sm.marked, 0);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");  // all of the CTA's marks
  if (lane == 0) put(&x->marked[split].number, mine);
  uint64_t theirs = back.mine;
  if (other) do
      asm volatile("ld.acquire.gpu.global.u64 %0,[%1];"
                   : "=l"(theirs)
                   : "l"(&x->marked[lane].number)
                   : "memory");
    while (theirs != back.mine);
  __syncwarp();
  if (lane == 0) mb_arrive(&sm.open);
}

// The statistics of head h, by its keeper. The last word is no mark.
template <class R, int N>
__device__ __forceinline__ void send_statistics(Smem<R, N>& sm, const Args& p, const Span& sp,
                                                int h, float sum) {
  put(&exchange_of<N>(p, sp)->stat[split_here(p)][h],
      make_uint4(__float_as_uint(sm.m[h]), __float_as_uint(sum), __float_as_uint(sm.top[h]), 0));
}

constexpr uint32_t kEmpty = ~0u;  // two bf16 NaNs as no conversion makes them

// Two warps that have nothing left to copy mark where this CTA's units go, when its first rows are
// there: before, marks delay the rows; by more warps, in turns with pauses, or by weigh, they delay
// the scores.
template <class R, int N>
__device__ __forceinline__ void mark_units(Smem<R, N>& sm, const Args& p, const Span& sp) {
  const int t = thread_here() & 63;
  uint4* to = units_of(exchange_of<N>(p, sp)) + split_here(p) * 64 + t;
  // a barrier's second phase would look like none
  if (sp.blocks > 0 && sp.blocks <= kReady) mb_wait(&sm.ready[min(sp.blocks, 2) - 1], 0);
#pragma unroll 1
  for (int u = 0; u < N; u++, to += 64 * p.splits)
    put(to, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  __syncwarp();
  if ((t & 31) == 0) mb_arrive(&sm.marked);
}
// The keeper of head h marks where its statistics go.
template <int N>
__device__ __forceinline__ void mark_statistics(const Args& p, const Span& sp, int h) {
  put(&exchange_of<N>(p, sp)->stat[split_here(p)][h], make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
}

// The weigh warpgroups store their sums.
template <int N>
__device__ __forceinline__ void send_exchanged(const Args& p, const Span& sp,
                                               const float (&o)[4][N / 2]) {
  const int tid = thread_here(), g = tid / 128, w = tid / 32 & 3;
  uint4* to = units_of(exchange_of<N>(p, sp)) +
              ((g * (N / 2) + w / 2) * p.splits + split_here(p)) * 64 + (tid & 63);
#pragma unroll
  for (int m = 0; m < 4; m += 2)
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      put(to, unit_of<N>(o, m, j));
      to += 2 * 64 * p.splits;
    }
}

// Where the splits' weights of each head are: over Q, since weigh may still be at the last rows.
template <class R, int N>
__device__ __forceinline__ auto weights_of(Smem<R, N>& sm) {
  static_assert(sizeof sm.q >= kMaxExchanged * N * sizeof(float));
  return reinterpret_cast<float(*)[N]>(sm.q);
}

// The score warpgroup makes the weights when every split's statistics are there: two lanes have
// eight splits of a head each.
template <class R, int N>
__device__ __forceinline__ void exchanged_weights(Smem<R, N>& sm, const Args& p, const Span& sp) {
  const auto weight = weights_of(sm);
  const int t = thread_here() & 127, h = min(t / 2, N - 1), s0 = 8 * (t & 1), S = p.splits;
  const float4* stat = &exchange_of<N>(p, sp)->stat[0][h];
  touch(p.lse, p.sink);
  mb_wait(&sm.open, 0);
  uint4 v[8];
#pragma unroll
  for (int j = 0; j < 8; j++) v[j].w = kEmpty;
  for (bool again = true; again;) {
    again = false;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (v[j].w == kEmpty) v[j] = get(stat + min(s0 + j, S - 1) * N);
#pragma unroll
    for (int j = 0; j < 8; j++) again |= v[j].w == kEmpty;
    again = __any_sync(~0u, again);
  }
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
  bar<2, Config<R, N>::kScore>();  // the last products with Q are done
#pragma unroll
  for (int j = 0; j < 8; j++) weight[s0 + j][h] = s0 + j < S ? m[j] * f : 0.f;
  meet<3, Config<R, N>::kMath>();
}

// The weigh warpgroups add up this CTA's units in the order of the splits, a thread kWords of each
// part. All parts that it has registers for are asked for at once: 16 of a unit, or eight of two.
template <class R, int N, int kWords>
__device__ __forceinline__ void add_units(Smem<R, N>& sm, const Args& p, const Span& sp,
                                          int count) {
  constexpr int kThreads = 256 / kWords, kUnits = 256 / kThreads;  // of a unit, at once
  const auto weight = weights_of(sm);
  const int tid = thread_here(), i = tid % kThreads * (kWords / 2), S = p.splits,
            split = split_here(p);
  const bool two = S <= 8;
  bool met = false;
#pragma unroll 1
  for (int k = tid / kThreads; k < count || !met; k += two ? 2 * kUnits : kUnits) {
    const int u = k * S + split, last = two ? u + kUnits * S : u;
    const uint2* a = reinterpret_cast<const uint2*>(units_of(exchange_of<N>(p, sp))) + i;
    const uint2* b = a + (two ? last * S : u * S + 8) * 128;
    a += u * S * 128;
    asm volatile("" : "+l"(a), "+l"(b));  // so that parts differ by constants
    const int in_a = k < count ? S : 0, in_b = !two ? in_a - 8 : k + kUnits < count ? S : 0;
    uint32_t v[16][kWords] = {};
#pragma unroll
    for (int s = 0; s < 8; s++) {
      if (s < in_a) v[s][0] = kEmpty;
      if (s < in_b) v[8 + s][0] = kEmpty;
    }
    for (bool again = true; again;) {
      again = false;
#pragma unroll
      for (int s = 0; s < 8; s++) {
        if (v[s][0] == kEmpty) get(a + s * 128, v[s]);
        if (v[8 + s][0] == kEmpty) get(b + s * 128, v[8 + s]);
      }
#pragma unroll
      for (int s = 0; s < 16; s++) again |= v[s][0] == kEmpty;
      again = __any_sync(~0u, again);
    }
    if (!met) meet<3, Config<R, N>::kMath>();  // the weights are there
    met = true;
    float acc[kWords / 2][4] = {};
    const auto add = [&](int s0, const float* by) {
#pragma unroll
      for (int s = s0; s < s0 + 8; s++, by += N)
#pragma unroll
        for (int c = 0; c < kWords; c += 2)
          add_part(acc[c / 2], v[s][c], v[s][c + 1], *reinterpret_cast<const float2*>(by));
    };
    const auto put_all = [&](int unit) {
#pragma unroll
      for (int c = 0; c < kWords / 2; c++) put_merged<R, N>(p, sp, unit, i + c, acc[c]);
    };
    const auto weights = [&](int unit) {
      return &weight[0][8 * (unit / 2 % (N / 8)) + 2 * (i / 2 & 3)];
    };
    if (in_a == 0) continue;
    add(0, weights(u));
    if (two) {
      put_all(u);
      if (in_b == 0) continue;
#pragma unroll
      for (int c = 0; c < 2 * kWords; c++) acc[c / 4][c % 4] = 0.f;
    }
    add(8, two ? weights(last) : weights(u) + 8 * N);
    put_all(last);
  }
}

template <class R, int N>
__device__ __forceinline__ void collect(Smem<R, N>& sm, const Args& p, const Span& sp) {
  const int count = static_cast<int>(over_splits(p, N - split_here(p) + p.splits - 1));
  touch(p.out, reinterpret_cast<const void*>(p.out_head));
  mb_wait(&sm.open, 0);
  // With many heads there are more than two, and no code for fewer.
  if (N > 2 * kMaxExchanged || count > 2) return add_units<R, N, 4>(sm, p, sp, count);
  if constexpr (N <= 2 * kMaxExchanged) add_units<R, N, 2>(sm, p, sp, count);
}

}  // namespace winnow::internal::attend::decode_sm90
