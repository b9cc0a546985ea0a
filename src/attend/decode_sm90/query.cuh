// Decode on Hopper: Q in shared memory, the first token's and later ones'.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Q times 2^(13 - e) is in fp16's range; e from the bits of Q's largest value. An infinity or NaN
// is its head's own matter: 2^4 then keeps the others' up to 4,000.
__device__ __forceinline__ int q_exponent(uint32_t most) {
  return most >= 0x7f80 ? 9 : min(max(static_cast<int>(most >> 7) - 127, -60), 100);
}
// Of two bf16 each, by size, with any sign; a NaN is the largest.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t x) {
  asm("max.NaN.xorsign.abs.bf16x2 %0,%0,%1;" : "+r"(most) : "r"(x));
  return most;
}
__device__ __forceinline__ uint32_t larger(uint32_t most, const uint4& v) {
  return larger(larger(most, larger(v.x, v.y)), larger(v.z, v.w));
}
__device__ __forceinline__ uint32_t largest(uint32_t most) {  // of a warp
  return __reduce_max_sync(~0u, max(most & 0x7fff, most >> 16 & 0x7fff));
}

__device__ __forceinline__ void get_shared(uint32_t* x, uint32_t at) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void put_shared(uint32_t at, uint32_t x, uint32_t y, uint32_t z,
                                           uint32_t u) {
  asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(u)
               : "memory");
}

// What Q is multiplied by, twice, as bf16: 2^(13 - e), exact times Q.
__device__ __forceinline__ uint32_t q_factor(int e) { return (140 - e) * 0x800080u; }
// Two values of Q times f, as fp16.
__device__ __forceinline__ uint32_t convert_q(uint32_t two, uint32_t f) {
  const uint32_t x = mul_b2(two, f);
  return pack<false>(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}

// Eight columns of Q, times f, in shared memory: columns permuted to match the rows' fragments.
template <class R, int N, bool kRopePart>
__device__ __forceinline__ void put_q(Smem<R, N>& sm, int h, int c, const uint4& v, uint32_t f) {
  using K = Config<R, N>;
  uint8_t* row = sm.q + (kRopePart ? K::kNopeTiles : c >> 3) * (N * 128) + h * 128;
  uint32_t x[4] = {v.x, v.y, v.z, v.w};
  if constexpr (R::kFp8) {
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = kRopePart ? mul_b2(x[k], f) : convert_q(x[k], f);
  }
  if constexpr (R::kFp8 && !kRopePart) {
    // a 16-column step reads columns 4t,4t+1 as its k = 2t,2t+1 and 4t+2,4t+3 as its k = 2t+8,2t+9
    const int step = (c & 7) >> 1, u = c & 1;
    *reinterpret_cast<uint2*>(row + (((step * 2) ^ (h & 7)) << 4) + u * 8) = make_uint2(x[0], x[2]);
    *reinterpret_cast<uint2*>(row + (((step * 2 + 1) ^ (h & 7)) << 4) + u * 8) =
        make_uint2(x[1], x[3]);
  } else {
    *reinterpret_cast<uint4*>(row + (((c & 7) ^ (h & 7)) << 4)) =
        make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// Splits share Q, and 16 CTAs that miss the same lines at once wait 6,000 cycles for them. So each
// asks for a part first, and the L2 has Q when all of them read it.
template <int N>
__device__ __forceinline__ void prefetch_q(const Args& p) {
  unsigned block, token;  // read here: roles share no register
  asm volatile("mov.u32 %0,%%ctaid.x;\nmov.u32 %1,%%ctaid.y;" : "=r"(block), "=r"(token));
  const int group = static_cast<int>(over_splits(p, block)), split = block - group * p.splits;
  const int heads = min(p.heads - group * N, N), i = split * 128 + (thread_here() & 127);
  const auto ask = [&](const bf16* q, int64_t stride, int h, int c) {
    if (h < heads)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(q + (group * N + h) * stride + c * 64));
  };
  if (i < N * 8) ask(p.q + token * p.q_token, p.q_head, i / 8, i % 8);
  if (i < N) ask(p.q_rope + token * p.qr_token, p.qr_head, i, 0);
}

// Q of the first token. The weigh warps take the NoPE part (a warp: heads w, w+8, ...), the score
// warps the RoPE part (a warp: four heads a load).
template <class R, int N, bool kRopePart>
__device__ __forceinline__ float load_q(Smem<R, N>& sm, const Args& p, const Span& sp) {
  using K = Config<R, N>;
  const int tid = thread_here(), lane = tid & 31, w = (tid / 32) & 7;
  constexpr int kRopeHeads = K::kScore / 8;  // of a load
  constexpr int kLoads = kRopePart ? (N + kRopeHeads - 1) / kRopeHeads : N / 4;
  const int h0 = kRopePart ? w % (kRopeHeads / 4) * 4 + lane / 8 : w;
  uint4 v[kLoads];
  const int64_t stride = kRopePart ? p.qr_head : p.q_head;
  const bf16* at = (kRopePart ? p.q_rope + sp.token * p.qr_token + (lane & 7) * 8
                              : p.q + sp.token * p.q_token + lane * 8) +
                   (sp.head0 + h0) * stride;
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int h = kRopePart ? h0 + kRopeHeads * i : h0 + 8 * (i / 2), half = kRopePart ? 0 : i & 1;
    v[i] = make_uint4(0, 0, 0, 0);
    if (h < sp.heads && (kRopePart || lane + 32 * half < R::kNope / 8))
      v[i] = __ldg(reinterpret_cast<const uint4*>(at) + 32 * half);
    if (kRopePart || half) at += (kRopePart ? kRopeHeads : 8) * stride;
  }
  uint32_t f = 0;
  float back = 1;
  if constexpr (R::kFp8) {
    // one power of two for all heads brings Q into fp16's range
    uint32_t mx = 0;
#pragma unroll
    for (int i = 0; i < kLoads; i++) mx = larger(mx, v[i]);
    mx = largest(mx);
    if (lane == 0) atomicMax(&sm.qmax, mx);
    meet<1, K::kMath>();
    const int e = q_exponent(sm.qmax);
    f = q_factor(e);
    back = pow2i(e - 13);
  }
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int h = kRopePart ? h0 + kRopeHeads * i : h0 + 8 * (i / 2),
              c = kRopePart ? lane & 7 : lane + 32 * (i & 1);
    if (h < N && (kRopePart || c < R::kNope / 8)) put_q<R, N, kRopePart>(sm, h, c, v[i], f);
  }
  fence_async();
  meet<1, K::kMath>();
  return back;
}

// 16 bytes into shared memory, zeros where nothing is `there`.
__device__ __forceinline__ void copy_16(uint32_t to, const bf16* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(there * 16)
               : "memory");
}

// Q of a later token, by the score warpgroups alone while the others are still at the last one. All
// of it is asked for at once, to where it will be, looked at for its largest value as it comes, and
// converted there: a warp has heads 2w and 2w+1 of every eight, a lane two chunks of eight columns
// of one of them; of two warpgroups each has every other eight. Some 1,000 instructions a warp.
template <class R, int N>
__device__ __forceinline__ float reload_q(Smem<R, N>& sm, const Args& p, int token, int head0) {
  using K = Config<R, N>;
  static_assert(R::kFp8 && N % 16 == 0);
  constexpr int kTile = N * 128, kTurns = N / 16, kRope = N / 16;
  constexpr int kEights = 2 / K::kScorers;  // of the 16 heads of a turn
  const int t = thread_here() & 127, lane = t & 31, w = t / 32;
  const int scorer = K::kScorers == 1 ? 0 : thread_here() / 128 & 1, h8 = 8 * scorer;
  const int heads = min(p.heads - head0, N);
  bar<2, K::kScore>();  // all warps' products with the last Q are done
  // chunk lane of a head, and the one 32 further: those of odd heads lie 16 bytes aside
  const bf16* from = p.q + token * p.q_token + (head0 + h8 + 2 * w) * p.q_head + lane * 8;
  uint32_t to =
      s32(sm.q) + (lane >> 3) * kTile + (h8 + 2 * w) * 128 + (((lane & 7) ^ (2 * w)) << 4);
#pragma unroll 1
  for (int h = h8 + 2 * w; h < N; h += 16) {
#pragma unroll
    for (int k = 0; k < 2 * kEights; k++) {  // heads h, h + 1, of both eights h + 8, h + 9
      const bool there = h + k % 2 + k / 2 * 8 < heads;
      const uint32_t at = (k & 1 ? (to ^ 16) + 128 : to) + k / 2 * 1024;
      copy_16(at, from, there);
      if (lane + 32 < R::kNope / 8) copy_16(at + 4 * kTile, from + 256, there);
      from += (k & 1 ? 8 * K::kScorers - 1 : 1) * p.q_head;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    to += 2048;
  }
  const int h0 = w * 4 + lane / 8;
  const uint32_t rope =
      s32(sm.q) + K::kNopeTiles * kTile + h0 * 128 + (((lane & 7) ^ (h0 & 7)) << 4);
  from = p.q_rope + token * p.qr_token + (head0 + h0) * p.qr_head + (lane & 7) * 8;
  // of two warpgroups the second has the first 16 heads' RoPE
  const auto mine = [&](int i) { return K::kScorers == 1 || (i & 1) != scorer; };
#pragma unroll
  for (int i = 0; i < kRope; i++)
    if (mine(i)) copy_16(rope + i * 2048, from + i * 16 * p.qr_head, h0 + 16 * i < heads);
  const int odd = 2 * w + (lane >> 2 & 1);
  const uint32_t first =
      s32(sm.q) + (lane >> 3) * kTile + (h8 + odd) * 128 + (((lane & 3) * 2 ^ odd) << 4);
  // this lane's chunks of heads h and h + 8, 32 bytes at a time
  const auto each = [&](uint32_t from_here, auto f) {
#pragma unroll
    for (int k = 0; k < 2 * kEights; k++)
      if (k % 2 == 0 || (lane >> 3) + 4 < K::kNopeTiles)
        f(from_here + k / 2 * 1024 + (k & 1) * 4 * kTile);
  };
  uint32_t most = 0, x[8];
  to = first;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn++, to += 2048) {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group %0;" ::"n"(kTurns) : "memory");
    __syncwarp();
    each(to, [&](uint32_t at) {
      get_shared(x, at);
      get_shared(x + 4, at ^ 16);
      most = larger(larger(most, make_uint4(x[0], x[1], x[2], x[3])),
                    make_uint4(x[4], x[5], x[6], x[7]));
    });
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kRope; i++)
    if (mine(i)) {
      get_shared(x, rope + i * 2048);
      most = larger(most, make_uint4(x[0], x[1], x[2], x[3]));
    }
  most = largest(most);
  if (lane == 0) sm.qpart[4 * scorer + w] = most;
  bar<2, K::kScore>();
#pragma unroll
  for (int k = 0; k < 4 * K::kScorers; k++) most = max(most, sm.qpart[k]);
  const int e = q_exponent(most);
  const uint32_t f = q_factor(e);
  to = first;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn++, to += 2048)
    each(to, [&](uint32_t at) {
      get_shared(x, at);
      get_shared(x + 4, at ^ 16);
#pragma unroll
      for (int c = 0; c < 8; c++) x[c] = convert_q(x[c], f);
      put_shared(at, x[0], x[2], x[4], x[6]);
      put_shared(at ^ 16, x[1], x[3], x[5], x[7]);
    });
#pragma unroll
  for (int i = 0; i < kRope; i++)
    if (mine(i)) {
      get_shared(x, rope + i * 2048);
      put_shared(rope + i * 2048, mul_b2(x[0], f), mul_b2(x[1], f), mul_b2(x[2], f),
                 mul_b2(x[3], f));
    }
  fence_async();
  bar<2, K::kScore>();
  return pow2i(e - 13);
}

// Asks for the next token's Q, long before it is read.
template <class R>
__device__ __forceinline__ void expect_q(const Args& p, const Span& sp) {
  const int64_t token = int64_t{sp.token} + gridDim.y;
  if (token >= p.tokens) return;
  const int t = thread_here() & 127, line = t & 7;
  const auto ask = [](const bf16* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
  };
#pragma unroll 1
  for (int h = t / 8; h < sp.heads; h += 16) {
    if (line * 64 < R::kNope) ask(p.q + token * p.q_token + (sp.head0 + h) * p.q_head + line * 64);
    if (line == 7) ask(p.q_rope + token * p.qr_token + (sp.head0 + h) * p.qr_head);
  }
}

}  // namespace winnow::internal::attend::decode_sm90
