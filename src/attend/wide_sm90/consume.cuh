// Wide attention on Hopper: scores, softmax, weighted sums and the output, by two warpgroups in
// turn.
//
// The tensor core's order for a pair of blocks is QK a, QK b, PV a, PV b: softmax of a runs under
// QK b, softmax of b under PV a, the gather of the next a under PV b. Logits are in log2 units. A
// row's reference m is the maximum of its first block and moves only when a logit exceeds it by
// kLag: P in bf16 and sums in fp32 are as exact with an old reference, and no lanes talk to each
// other.
#pragma once

#include <cfloat>

#include "attend/wide_sm90/layout.cuh"
#include "cuda/wgmma_bf16.h"

namespace winnow::internal::attend::wide_sm90 {

constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f, kLag = 8.f;

// From products to logits; a scale of 0 keeps masked scores at -inf. Negative ones: see score().
__device__ __forceinline__ float unit(const Args& p) {
  return fmaxf(fabsf(p.scale) * kLog2e, FLT_MIN);
}

// A thread's rows of the accumulators are heads 16 * warp + lane / 4 and 8 more; its columns 8 j +
// 2
// * (lane % 4) and the next.
struct Rows2 {
  float m[2] = {-FLT_MAX, -FLT_MAX};  // reference
  float l[2] = {0, 0};  // sum of P over this warpgroup's blocks, this thread's columns
  float top[2] = {-INFINITY, -INFINITY};
  float alpha[2];    // what the sums before the block at hand weigh
  bool far = false;  // see place()

  // A new reference. Beyond 2^24 a logit's rounding is no longer small against kLag, and the
  // exponent must be the difference of two rounded logits; below, one fused operation is exact
  // enough.
  __device__ void place(int i, float y) {
    m[i] = y;
    far = far || fabsf(y) > 16777216.f;
  }
};

__device__ __forceinline__ void rescale(float (&o)[128], float a0, float a1) {
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    o[i] *= a0;
    o[i + 1] *= a0;
    o[i + 2] *= a1;
    o[i + 3] *= a1;
  }
}

// S (+)= Q K^T over tiles [first, last).
__device__ __forceinline__ void scores(float (&s)[32], uint32_t q, uint32_t k, int tiles,
                                       bool start) {
  const uint32_t qd = fresh(desc(q, 16)), kd = fresh(desc(k, 16));
#pragma unroll
  for (int t = 0; t < tiles; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t off = (t * kTileBytes + i * 32) >> 4;
      wgmma64(s, qd + off, kd + off, !start || t > 0 || i > 0);
    }
}

// O += P V, 256 columns; P from registers or from its tile. A group for each 16 rows, or one where
// no part is given back before the whole (kParts false).
__device__ __forceinline__ void weigh(float (&o)[128], const uint32_t (&p)[16], uint32_t v) {
  const uint32_t vd = fresh(desc(v, kTileBytes));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    wgmma256(o, p + 4 * i, vd + (i * 2048 >> 4));
    wg_commit();
  }
}
template <bool kParts>
__device__ __forceinline__ void weigh(float (&o)[128], uint32_t p, uint32_t v) {
  const uint32_t vd = fresh(desc(v, kTileBytes)), pd = fresh(desc(p, 16));
#pragma unroll
  for (int i = 0; i < 4; i++) {
    wgmma256(o, pd + (i * 32 >> 4), vd + (i * 2048 >> 4));
    if (kParts || i == 3) wg_commit();
  }
}

// Rows whose logits outgrew the reference. x: this thread's maxima.
// +inf weighs 1 and what is finite nothing: the reference becomes k 2^n, far above, and the score
// 2^n.
__device__ __forceinline__ void raise(float (&s)[32], const float (&x)[2], float k, Rows2& rows) {
  const int bits = __float_as_int(k);
  const float far = __int_as_float((bits & 0x7fffff) | 227 << 23);
  const float score = __int_as_float(min(354 - (bits >> 23), 254) << 23);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float y = x[i] * k;
    y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
    y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
    const bool inf = y > FLT_MAX;
    if (inf) y = far;
    if (y > rows.m[i] + kLag) {
      rows.alpha[i] = ex2(rows.m[i] - y);
      rows.l[i] *= rows.alpha[i];
      rows.place(i, y);
    }
    if (inf)
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++)
          s[4 * j + e] = s[4 * j + e] * k > FLT_MAX ? score : s[4 * j + e];
  }
}

template <bool kFar>
__device__ __forceinline__ void exponentials(const float (&s)[32], uint32_t (&p)[16], Rows2& rows,
                                             float k) {
  const auto weight = [&](float x, float m) {
    return ex2(kFar ? __fsub_rn(__fmul_rn(x, k), m) : fmaf(x, k, -m));
  };
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float a = weight(s[4 * j], rows.m[0]), b = weight(s[4 * j + 1], rows.m[0]);
    const float c = weight(s[4 * j + 2], rows.m[1]), d = weight(s[4 * j + 3], rows.m[1]);
    rows.l[0] += a + b;
    rows.l[1] += c + d;
    p[2 * j] = pack<true>(a, b);
    p[2 * j + 1] = pack<true>(c, d);
  }
}

// This thread's maxima of its two rows.
__device__ __forceinline__ void peaks(const float (&s)[32], float (&x)[2]) {
  x[0] = fmaxf(s[0], s[1]), x[1] = fmaxf(s[2], s[3]);
#pragma unroll
  for (int j = 1; j < 8; j++) {
    x[0] = fmaxf(x[0], fmaxf(s[4 * j], s[4 * j + 1]));
    x[1] = fmaxf(x[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
}

__device__ __forceinline__ bool outgrown(const float (&x)[2], const Rows2& rows, float k) {
  return x[0] * k > rows.m[0] + kLag || x[1] * k > rows.m[1] + kLag;
}

// P of a block, as A fragments, where anything is out of the ordinary: rows that take no part, a
// negative scale, logits that outgrew a reference, references far from zero. True where this warp
// raised a reference.
__device__ __forceinline__ bool rare_softmax(float (&s)[32], uint32_t (&p)[16], Rows2& rows,
                                             float k, uint2 valid) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (!((j < 4 ? valid.x : valid.y) >> (8 * (j & 3) + 2 * quad + e) & 1))
        s[4 * j + e] = s[4 * j + e + 2] = -INFINITY;
  float x[2];
  peaks(s, x);
  rows.top[0] = fmaxf(rows.top[0], x[0]);
  rows.top[1] = fmaxf(rows.top[1], x[1]);
  const bool up = __any_sync(~0u, outgrown(x, rows, k));
  if (up) raise(s, x, k, rows);
  if (rows.far) exponentials<true>(s, p, rows, k);
  else exponentials<false>(s, p, rows, k);
  return up;
}

// P and the references to the other warpgroup, which fences before its products read them: a fence
// here would wait behind the producer's copies.
template <class Family>
__device__ __forceinline__ void publish(Smem<Family>& sm, int buffer, const uint32_t (&p)[16],
                                        const Rows2& rows) {
  const int w = (threadIdx.x / 32) & 3, lane = threadIdx.x & 31;
  const int row = w * 16 + (lane & 15);
  const uint32_t dst = s32(p_tile(sm, buffer)) + row * 128;
#pragma unroll
  for (int i = 0; i < 4; i++)
    stsm4(dst + (((2 * i + (lane >> 4)) ^ (row & 7)) << 4), p[4 * i], p[4 * i + 1], p[4 * i + 2],
          p[4 * i + 3]);
  if ((lane & 3) == 0) {
    sm.m[buffer][w * 16 + lane / 4] = rows.m[0];
    sm.m[buffer][w * 16 + lane / 4 + 8] = rows.m[1];
  }
  __syncwarp();
  if (lane == 0) mb_arrive(&sm.p_full[buffer]);
}

// Follows the references of the other warpgroup's block; nothing of this one may be in flight.
template <class Family>
__device__ __forceinline__ void follow(Smem<Family>& sm, int buffer, float (&o)[128], Rows2& rows) {
  const int w = (threadIdx.x / 32) & 3, lane = threadIdx.x & 31;
  const float m0 = sm.m[buffer][w * 16 + lane / 4], m1 = sm.m[buffer][w * 16 + lane / 4 + 8];
  if (__builtin_expect(__any_sync(~0u, m0 != rows.m[0] || m1 != rows.m[1]), 0)) {
    const float a0 = ex2(rows.m[0] - m0), a1 = ex2(rows.m[1] - m1);
    rows.l[0] *= a0;
    rows.l[1] *= a1;
    if (m0 != rows.m[0]) rows.place(0, m0);
    if (m1 != rows.m[1]) rows.place(1, m1);
    rescale(o, a0, a1);
  }
}

// A half may be overwritten, 16 rows as soon as a product of weigh() has read them. kLater: groups
// of products issued since.
template <int kLater, class Family>
__device__ __forceinline__ void release(Smem<Family>& sm, int buffer, int half) {
  const bool first = threadIdx.x % 32 == 0;
  wg_wait<3 + kLater>();
  if (first) mb_arrive(&sm.empty[buffer][half][0]);
  wg_wait<2 + kLater>();
  if (first) mb_arrive(&sm.empty[buffer][half][1]);
  wg_wait<1 + kLater>();
  if (first) mb_arrive(&sm.empty[buffer][half][2]);
  wg_wait<kLater>();
  if (first) mb_arrive(&sm.empty[buffer][half][3]);
}

// O times the rows' factors, 256 columns, as bf16. Four lanes share a row: neighbours exchange half
// of what they hold of 16 columns, so that each stores 8 bytes and all of them one sector of 32.
__device__ __forceinline__ void write_out(const Args& p, const Work& work, float (&o)[128],
                                          const float (&f)[2]) {
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int head = work.head0 + (warp & 3) * 16 + lane / 4;
  const bool odd = lane & 1;
  const bool there[2] = {head < p.heads, head + 8 < p.heads};
  uint64_t dst[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    dst[i] =
        reinterpret_cast<uint64_t>(p.out + work.token * p.out_token + (head + 8 * i) * p.out_head +
                                   (warp / 4) * 256 + (lane & 1) * 8 + (lane & 2) * 2);
    asm volatile("" : "+l"(dst[i]));  // or the stride is loaded and added for every store
  }
#pragma unroll
  for (int c = 0; c < 16; c++) {  // 16 columns
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* x = o + c * 8 + 2 * i;
      const uint32_t a = pack<true>(x[0] * f[i], x[1] * f[i]);
      const uint32_t b = pack<true>(x[4] * f[i], x[5] * f[i]);
      const uint32_t y = __shfl_xor_sync(~0u, odd ? a : b, 1);
      if (there[i])
        __stcs(reinterpret_cast<uint2*>(dst[i] + c * 32),
               odd ? make_uint2(y, b) : make_uint2(a, y));
    }
    if (c % 2) asm volatile("" ::: "memory");  // stores as they come
  }
}

// Sums of both warpgroups, log-sum-exp and maximum, output.
template <class Family, int kWg>
__device__ __forceinline__ void finish(Smem<Family>& sm, const Args& p, const Work& work,
                                       float (&o)[128], Rows2& rows) {
  const int w = (threadIdx.x / 32) & 3, lane = threadIdx.x & 31, row = w * 16 + lane / 4;
  const float k = unit(p);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], d);
      rows.top[i] = fmaxf(rows.top[i], __shfl_xor_sync(~0u, rows.top[i], d));
    }
  if ((lane & 3) == 0)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sm.sum[work.turn][kWg][row + 8 * i] = rows.l[i];
      sm.top[work.turn][kWg][row + 8 * i] = rows.top[i] * k;
    }
  bar<3, kConsumers>();
  float f[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int h = work.head0 + row + 8 * i;
    const float sum = sm.sum[work.turn][0][row + 8 * i] + sm.sum[work.turn][1][row + 8 * i];
    const float top = fmaxf(sm.top[work.turn][0][row + 8 * i], sm.top[work.turn][1][row + 8 * i]);
    const bool empty = sum == 0;  // NaN is not empty
    if (kWg == 0 && (lane & 3) == 0 && h < p.heads) {
      if (p.lse)
        p.lse[work.token * p.lse_token + h * p.lse_head] = empty ? p.empty_lse
                                                           : top > FLT_MAX
                                                               ? INFINITY
                                                               : (log2f(sum) + rows.m[i]) * kLn2;
      if (p.max_logit)
        p.max_logit[work.token * p.max_token + h * p.max_head] = empty        ? -INFINITY
                                                                 : sum == sum ? top * kLn2
                                                                              : sum;
    }
    const float sink = p.sink && h < p.heads ? ex2(p.sink[h] * kLog2e - rows.m[i]) : 0.f;
    f[i] = empty ? 0.f : 1.f / (sum + sink);
  }
  write_out(p, work, o, f);
}

// A warpgroup's part of every item. Halves are waited for and released as described in the layout.
// The tensor core takes products of both warpgroups in turn, so what should be first must be alone:
// b is scored after a, and a is weighed after b is scored (unless b's rows are late), or the
// softmax that the others wait for begins late.
template <class Family, int kWg>
__device__ __forceinline__ void consume(Smem<Family>& sm, const Args& p) {
  using S = Shape<Family>;
  constexpr int kFirst = S::kValueTiles / 2;
  const int lane = threadIdx.x & 31;
  const float k = unit(p);
  const uint32_t q0 = s32(sm.q), own = s32(sm.k[kWg]), other = s32(sm.k[1 - kWg]);
  const uint32_t own_v = own + kWg * kFirst * kTileBytes,
                 other_v = other + kWg * kFirst * kTileBytes;
  const uint32_t other_p = s32(p_tile(sm, 1 - kWg));
  uint32_t ph[2] = {0, 0}, q_ph = 0;  // of this warpgroup's buffer and the other's
  float s[32];
  uint32_t pr[16];
  float x[2];   // maxima of s
  uint2 valid;  // of the block in s
  // Scores of this warpgroup's block. `pending`: the other block's product is in flight, and its
  // half to be released.
  constexpr uint32_t kHalf = kFirst * kTileBytes;
  auto score = [&](bool pending) {
    if (pending && !mb_done(&sm.full[kWg][0], ph[0])) {  // rows are late: release at once
      release<0>(sm, 1 - kWg, kWg);
      pending = false;
    }
    mb_wait(&sm.full[kWg][0], ph[0]);
    wg_fence();
    scores(s, q0, own, kFirst, true);
    wg_commit();
    if (pending) release<1>(sm, 1 - kWg, kWg);
    mb_wait(&sm.full[kWg][1], ph[0]);
    wg_fence();
    scores(s, q0 + kHalf, own + kHalf, S::kTiles - kFirst, false);
    wg_commit();
    valid = sm.valid[kWg];
    wg_wait<0>();
    hold(s);
    if (lane == 0) mb_arrive(&sm.scored[kWg]);
    peaks(s, x);
  };
  // P of this warpgroup's block from its scores, published. `raised` is called where this warp
  // raised a reference: then alpha says what O's earlier sums weigh. One branch decides whether all
  // is ordinary: each one taken costs 40 to 80 cycles of a chain that both warpgroups wait for.
  auto weights = [&](Rows2& rows, auto raised) {
    const bool odd = outgrown(x, rows, k) || rows.far || p.scale < 0 || (valid.x & valid.y) != ~0u;
    if (__builtin_expect(__any_sync(~0u, odd), 0)) {
      if (p.scale < 0)
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = -s[i];
      rows.alpha[0] = rows.alpha[1] = 1.f;
      if (rare_softmax(s, pr, rows, k, valid)) raised();
    } else {
      rows.top[0] = fmaxf(rows.top[0], x[0]);
      rows.top[1] = fmaxf(rows.top[1], x[1]);
      exponentials<false>(s, pr, rows, k);
    }
    if constexpr (S::kTail)
      bar<1 + kWg, 128>();  // P overwrites what the other warps may still read
    publish(sm, kWg, pr, rows);
    ph[0] ^= 1;
  };
#pragma unroll 1
  for (int item = blockIdx.x, n = 0; item < p.items; item += gridDim.x, n++) {
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0;
    Rows2 rows;
    mb_wait(&sm.q_full, q_ph);
    q_ph ^= 1;
    const int blocks = sm.blocks;
    const int mine = (blocks + 1 - kWg) / 2, pairs = (blocks + 1) / 2;
    if (mine == 0 && lane == 0) mb_arrive(&sm.q_empty);
#pragma unroll 1
    for (int i = 0; i < pairs; i++) {
      if constexpr (kWg == 0) {
        score(i > 0);
        if (i + 1 == mine && lane == 0) mb_arrive(&sm.q_empty);
        weights(rows, [&] { rescale(o, rows.alpha[0], rows.alpha[1]); });
        const bool both = 2 * i + 1 < blocks;
        if (both && mb_done(&sm.full[1][0], ph[1])) mb_wait(&sm.scored[1], ph[1]);
        wg_fence();
        weigh(o, pr, own_v);
        release<0>(sm, 0, 0);
        hold(o);
        if (both) {
          mb_wait(&sm.p_full[1], ph[1]);
          fence_async();
          ph[1] ^= 1;
          follow(sm, 1, o, rows);
          wg_fence();
          weigh<true>(o, other_p, other_v);
          mb_wait(&sm.scored[1], ph[1] ^ 1);  // past; but no phase may go by unwaited for
        }
      } else {
        mb_wait(&sm.scored[0], ph[1]);
        const bool both = 2 * i + 1 < blocks;
        if (both) {
          score(false);
          if (i + 1 == mine && lane == 0) mb_arrive(&sm.q_empty);
        }
        mb_wait(&sm.p_full[0], ph[1]);
        fence_async();
        ph[1] ^= 1;
        follow(sm, 0, o, rows);
        wg_fence();
        weigh<false>(o, other_p, other_v);
        bool up = false;
        if (both) weights(rows, [&] { up = true; });
        wg_wait<0>();
        hold(o);
        release<0>(sm, 0, 1);
        if (both) {
          if (__builtin_expect(up, 0)) rescale(o, rows.alpha[0], rows.alpha[1]);
          wg_fence();
          weigh(o, pr, own_v);
          release<0>(sm, 1, 1);
          hold(o);
        }
      }
    }
    if constexpr (kWg == 0) {
      wg_wait<0>();
      hold(o);
      if (blocks > 0 && blocks % 2 == 0) release<0>(sm, 1, 0);
    }
    Work work = work_at(p, item);  // again: registers are short above
    work.turn = n & 1;
    finish<Family, kWg>(sm, p, work, o, rows);
  }
}

}  // namespace winnow::internal::attend::wide_sm90
