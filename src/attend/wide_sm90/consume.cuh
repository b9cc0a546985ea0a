// Wide attention on Hopper: scores, softmax, weighted sums and the output, by two warpgroups in
// turn.
//
// The tensor core's order for a pair of blocks is QK a, QK b, PV a, PV b: softmax of a runs under
// QK b, softmax of b under PV a, the gather of the next a under PV b. Logits are in log2 units. A
// row's reference is the maximum of its first block and moves only when a logit exceeds it by kLag:
// P in bf16 and sums in fp32 are as exact with an old reference, and no lanes communicate.
#pragma once

#include <cfloat>

#include "attend/wide_sm90/layout.cuh"
#include "cuda/wgmma_bf16.h"

namespace winnow::internal::attend::wide_sm90 {

constexpr float kLag = 8.f;

// From products to logits. A scale of 0 keeps masked scores at -inf. Negative ones: see consume().
__device__ __forceinline__ float logit_unit(const Args& args) {
  return fmaxf(fabsf(args.scale) * kLog2e, FLT_MIN);
}

// A thread's two rows of the accumulators: heads 16 * warp + lane / 4 and 8 more. Its columns are
// 8 j + 2 * (lane % 4) and the next.
struct TwoRows {
  float reference[2] = {-FLT_MAX, -FLT_MAX};
  // Sums of P over this warpgroup's blocks, of this thread's columns.
  float row_sum[2] = {0, 0};
  float row_max[2] = {-INFINITY, -INFINITY};
  // What the sums before the block at hand are multiplied by.
  float rescale[2];
  // See place().
  bool far = false;

  // A new reference. Beyond 2^24 a logit's rounding is no longer small against kLag, and the
  // exponent must be the difference of two rounded logits; below, one fused operation is exact
  // enough.
  __device__ void place(int i, float logit) {
    reference[i] = logit;
    far = far || fabsf(logit) > 16777216.f;
  }
};

__device__ __forceinline__ void rescale_output(float (&o)[128], float by0, float by1) {
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    o[i] *= by0;
    o[i + 1] *= by0;
    o[i + 2] *= by1;
    o[i + 3] *= by1;
  }
}

// S (+)= Q K^T over `tiles` tiles.
__device__ __forceinline__ void multiply_keys(float (&s)[32], uint32_t q, uint32_t k, int tiles,
                                              bool start) {
  const uint32_t q_desc = fresh(desc(q, 16));
  const uint32_t k_desc = fresh(desc(k, 16));
#pragma unroll
  for (int tile = 0; tile < tiles; tile++)
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const uint32_t offset = (tile * kTileBytes + step * 32) >> 4;
      wgmma64(s, q_desc + offset, k_desc + offset, !start || tile > 0 || step > 0);
    }
}

// O += P V, 256 columns; P from registers or from its tile. A group for each 16 rows, or one where
// no part is given back before the whole (kParts false).
__device__ __forceinline__ void multiply_values(float (&o)[128], const uint32_t (&p)[16],
                                                uint32_t v) {
  const uint32_t v_desc = fresh(desc(v, kTileBytes));
#pragma unroll
  for (int step = 0; step < 4; step++) {
    wgmma256(o, p + 4 * step, v_desc + (step * 2048 >> 4));
    wg_commit();
  }
}
template <bool kParts>
__device__ __forceinline__ void multiply_values(float (&o)[128], uint32_t p, uint32_t v) {
  const uint32_t v_desc = fresh(desc(v, kTileBytes));
  const uint32_t p_desc = fresh(desc(p, 16));
#pragma unroll
  for (int step = 0; step < 4; step++) {
    wgmma256(o, p_desc + (step * 32 >> 4), v_desc + (step * 2048 >> 4));
    if (kParts || step == 3) wg_commit();
  }
}

// Moves the reference of rows whose logits outgrew it. `peak`: this thread's maxima. +inf weighs 1
// and what is finite nothing: the reference becomes unit 2^n, far above, and the score 2^n.
__device__ __forceinline__ void move_reference(float (&s)[32], const float (&peak)[2], float unit,
                                               TwoRows& rows) {
  const int bits = __float_as_int(unit);
  const float far = __int_as_float((bits & 0x7fffff) | 227 << 23);
  const float score = __int_as_float(min(354 - (bits >> 23), 254) << 23);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float logit = peak[i] * unit;
    logit = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
    logit = fmaxf(logit, __shfl_xor_sync(~0u, logit, 2));
    const bool infinite = logit > FLT_MAX;
    if (infinite) logit = far;
    if (logit > rows.reference[i] + kLag) {
      rows.rescale[i] = ex2(rows.reference[i] - logit);
      rows.row_sum[i] *= rows.rescale[i];
      rows.place(i, logit);
    }
    if (infinite)
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++)
          s[4 * j + e] = s[4 * j + e] * unit > FLT_MAX ? score : s[4 * j + e];
  }
}

// P as A fragments, and the row sums.
template <bool kFar>
__device__ __forceinline__ void exponentials(const float (&s)[32], uint32_t (&p)[16], TwoRows& rows,
                                             float unit) {
  const auto weight = [&](float x, float reference) {
    return ex2(kFar ? __fsub_rn(__fmul_rn(x, unit), reference) : fmaf(x, unit, -reference));
  };
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float p00 = weight(s[4 * j], rows.reference[0]);
    const float p01 = weight(s[4 * j + 1], rows.reference[0]);
    const float p10 = weight(s[4 * j + 2], rows.reference[1]);
    const float p11 = weight(s[4 * j + 3], rows.reference[1]);
    rows.row_sum[0] += p00 + p01;
    rows.row_sum[1] += p10 + p11;
    p[2 * j] = pack<true>(p00, p01);
    p[2 * j + 1] = pack<true>(p10, p11);
  }
}

// This thread's maxima of its two rows.
__device__ __forceinline__ void find_peaks(const float (&s)[32], float (&peak)[2]) {
  peak[0] = fmaxf(s[0], s[1]);
  peak[1] = fmaxf(s[2], s[3]);
#pragma unroll
  for (int j = 1; j < 8; j++) {
    peak[0] = fmaxf(peak[0], fmaxf(s[4 * j], s[4 * j + 1]));
    peak[1] = fmaxf(peak[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
}

__device__ __forceinline__ bool outgrown(const float (&peak)[2], const TwoRows& rows, float unit) {
  return peak[0] * unit > rows.reference[0] + kLag || peak[1] * unit > rows.reference[1] + kLag;
}

// P of a block, as A fragments, where anything is out of the ordinary: rows that take no part, a
// negative scale, logits that outgrew a reference, references far from zero. True where this warp
// moved a reference.
__device__ __forceinline__ bool rare_softmax(float (&s)[32], uint32_t (&p)[16], TwoRows& rows,
                                             float unit, uint2 valid) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (!((j < 4 ? valid.x : valid.y) >> (8 * (j & 3) + 2 * quad + e) & 1))
        s[4 * j + e] = s[4 * j + e + 2] = -INFINITY;
  float peak[2];
  find_peaks(s, peak);
  rows.row_max[0] = fmaxf(rows.row_max[0], peak[0]);
  rows.row_max[1] = fmaxf(rows.row_max[1], peak[1]);
  const bool moved = __any_sync(~0u, outgrown(peak, rows, unit));
  if (moved) move_reference(s, peak, unit, rows);
  if (rows.far) exponentials<true>(s, p, rows, unit);
  else exponentials<false>(s, p, rows, unit);
  return moved;
}

// Hands P and the references to the other warpgroup, which fences before its products read them: a
// fence here would wait behind the producer's copies.
template <class Family>
__device__ __forceinline__ void publish(Smem<Family>& smem, int buffer, const uint32_t (&p)[16],
                                        const TwoRows& rows) {
  const int warp = (threadIdx.x / 32) & 3;
  const int lane = threadIdx.x & 31;
  const int row = warp * 16 + (lane & 15);
  const uint32_t to = s32(p_tile(smem, buffer)) + row * 128;
#pragma unroll
  for (int i = 0; i < 4; i++)
    stsm4(to + (((2 * i + (lane >> 4)) ^ (row & 7)) << 4), p[4 * i], p[4 * i + 1], p[4 * i + 2],
          p[4 * i + 3]);
  if ((lane & 3) == 0) {
    smem.reference[buffer][warp * 16 + lane / 4] = rows.reference[0];
    smem.reference[buffer][warp * 16 + lane / 4 + 8] = rows.reference[1];
  }
  __syncwarp();
  if (lane == 0) mb_arrive(&smem.p_full[buffer]);
}

// Follows the references of the other warpgroup's block. Nothing of this one may be in flight.
template <class Family>
__device__ __forceinline__ void follow(Smem<Family>& smem, int buffer, float (&o)[128],
                                       TwoRows& rows) {
  const int warp = (threadIdx.x / 32) & 3;
  const int lane = threadIdx.x & 31;
  const float reference0 = smem.reference[buffer][warp * 16 + lane / 4];
  const float reference1 = smem.reference[buffer][warp * 16 + lane / 4 + 8];
  const bool differs = reference0 != rows.reference[0] || reference1 != rows.reference[1];
  if (__builtin_expect(__any_sync(~0u, differs), 0)) {
    const float by0 = ex2(rows.reference[0] - reference0);
    const float by1 = ex2(rows.reference[1] - reference1);
    rows.row_sum[0] *= by0;
    rows.row_sum[1] *= by1;
    if (reference0 != rows.reference[0]) rows.place(0, reference0);
    if (reference1 != rows.reference[1]) rows.place(1, reference1);
    rescale_output(o, by0, by1);
  }
}

// Gives a half back, 16 rows as soon as a product of multiply_values() has read them. kLater:
// groups of products issued since.
template <int kLater, class Family>
__device__ __forceinline__ void release(Smem<Family>& smem, int buffer, int half) {
  const bool first_lane = threadIdx.x % 32 == 0;
  wg_wait<3 + kLater>();
  if (first_lane) mb_arrive(&smem.empty[buffer][half][0]);
  wg_wait<2 + kLater>();
  if (first_lane) mb_arrive(&smem.empty[buffer][half][1]);
  wg_wait<1 + kLater>();
  if (first_lane) mb_arrive(&smem.empty[buffer][half][2]);
  wg_wait<kLater>();
  if (first_lane) mb_arrive(&smem.empty[buffer][half][3]);
}

// Writes O times the rows' factors, 256 columns, as bf16. Four lanes share a row: neighbours
// exchange half of what they hold of 16 columns, so that each stores 8 bytes and all of them one
// sector of 32.
__device__ __forceinline__ void write_out(const Args& args, const Work& work, float (&o)[128],
                                          const float (&factor)[2]) {
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  const int lane = threadIdx.x & 31;
  const int head = work.head_begin + (warp & 3) * 16 + lane / 4;
  const bool odd = lane & 1;
  const bool exists[2] = {head < args.heads, head + 8 < args.heads};
  uint64_t to[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    to[i] = reinterpret_cast<uint64_t>(args.out + work.token * args.out_token_stride +
                                       (head + 8 * i) * args.out_head_stride + (warp / 4) * 256 +
                                       (lane & 1) * 8 + (lane & 2) * 2);
    // Or the stride is loaded and added for every store.
    asm volatile("" : "+l"(to[i]));
  }
  // 16 columns at a time.
#pragma unroll
  for (int c = 0; c < 16; c++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* x = o + c * 8 + 2 * i;
      const uint32_t low = pack<true>(x[0] * factor[i], x[1] * factor[i]);
      const uint32_t high = pack<true>(x[4] * factor[i], x[5] * factor[i]);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (exists[i])
        __stcs(reinterpret_cast<uint2*>(to[i] + c * 32),
               odd ? make_uint2(other, high) : make_uint2(low, other));
    }
    // Stores as they come.
    if (c % 2) asm volatile("" ::: "memory");
  }
}

// The end of an item: sums of both warpgroups, log-sum-exp and maximum, output.
template <class Family, int kWarpgroup>
__device__ __forceinline__ void epilogue(Smem<Family>& smem, const Args& args, const Work& work,
                                         float (&o)[128], TwoRows& rows) {
  const int warp = (threadIdx.x / 32) & 3;
  const int lane = threadIdx.x & 31;
  const int row = warp * 16 + lane / 4;
  const float unit = logit_unit(args);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      rows.row_sum[i] += __shfl_xor_sync(~0u, rows.row_sum[i], d);
      rows.row_max[i] = fmaxf(rows.row_max[i], __shfl_xor_sync(~0u, rows.row_max[i], d));
    }
  const auto sum_of = [&](int of, int i) -> float& {
    return smem.row_sum[work.parity][of][row + 8 * i];
  };
  const auto max_of = [&](int of, int i) -> float& {
    return smem.max_logit[work.parity][of][row + 8 * i];
  };
  if ((lane & 3) == 0)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum_of(kWarpgroup, i) = rows.row_sum[i];
      max_of(kWarpgroup, i) = rows.row_max[i] * unit;
    }
  bar<kSumsWritten, kConsumers>();
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = work.head_begin + row + 8 * i;
    const float row_sum = sum_of(0, i) + sum_of(1, i);
    const float max_logit = fmaxf(max_of(0, i), max_of(1, i));
    // NaN is not empty.
    const bool empty = row_sum == 0;
    if (kWarpgroup == 0 && (lane & 3) == 0 && head < args.heads) {
      if (args.lse)
        args.lse[work.token * args.lse_token_stride + head * args.lse_head_stride] =
            empty                 ? args.empty_lse
            : max_logit > FLT_MAX ? INFINITY
                                  : (log2f(row_sum) + rows.reference[i]) * kLn2;
      if (args.max_logit)
        args.max_logit[work.token * args.max_token_stride + head * args.max_head_stride] =
            empty                ? -INFINITY
            : row_sum == row_sum ? max_logit * kLn2
                                 : row_sum;
    }
    const float sink =
        args.sink && head < args.heads ? ex2(args.sink[head] * kLog2e - rows.reference[i]) : 0.f;
    factor[i] = empty ? 0.f : 1.f / (row_sum + sink);
  }
  write_out(args, work, o, factor);
}

// A warpgroup's part of every item. Halves are waited for and released as described in the layout.
// The tensor core takes products of both warpgroups in turn, so what should be first must be alone:
// b is scored after a, and a is weighed after b is scored (unless b's rows are late), or the
// softmax that the others wait for begins late.
template <class Family, int kWarpgroup>
__device__ __forceinline__ void consume(Smem<Family>& smem, const Args& args) {
  using Tiles = TilesOf<Family>;
  constexpr int kHalfTiles = Tiles::kValueTiles / 2;
  constexpr uint32_t kHalfBytes = kHalfTiles * kTileBytes;
  constexpr int kOther = 1 - kWarpgroup;
  const int lane = threadIdx.x & 31;
  const float unit = logit_unit(args);
  const uint32_t q = s32(smem.q);
  const uint32_t own_k = s32(smem.k[kWarpgroup]);
  const uint32_t other_k = s32(smem.k[kOther]);
  const uint32_t own_v = own_k + kWarpgroup * kHalfTiles * kTileBytes;
  const uint32_t other_v = other_k + kWarpgroup * kHalfTiles * kTileBytes;
  const uint32_t other_p = s32(p_tile(smem, kOther));
  // Phases of this warpgroup's buffer and of the other's.
  uint32_t phase[2] = {0, 0};
  uint32_t q_phase = 0;
  float s[32];
  uint32_t p[16];
  // Maxima of s, and which rows of the block in s take part.
  float peak[2];
  uint2 valid;
  // Scores of this warpgroup's block. `pending`: the other block's product is in flight, and its
  // half is to be released, at once where rows are late.
  auto score = [&](bool pending) {
    if (pending && !mb_done(&smem.full[kWarpgroup][0], phase[0])) {
      release<0>(smem, kOther, kWarpgroup);
      pending = false;
    }
    mb_wait(&smem.full[kWarpgroup][0], phase[0]);
    wg_fence();
    multiply_keys(s, q, own_k, kHalfTiles, true);
    wg_commit();
    if (pending) release<1>(smem, kOther, kWarpgroup);
    mb_wait(&smem.full[kWarpgroup][1], phase[0]);
    wg_fence();
    multiply_keys(s, q + kHalfBytes, own_k + kHalfBytes, Tiles::kTiles - kHalfTiles, false);
    wg_commit();
    valid = smem.valid[kWarpgroup];
    wg_wait<0>();
    hold(s);
    if (lane == 0) mb_arrive(&smem.scored[kWarpgroup]);
    find_peaks(s, peak);
  };
  // P of this warpgroup's block from its scores, published. `on_move` is called where this warp
  // moved a reference: then rows.rescale says what O's earlier sums are multiplied by. One branch
  // decides whether all is ordinary: each one taken costs 40 to 80 cycles of a chain that both
  // warpgroups wait for.
  auto make_weights = [&](TwoRows& rows, auto on_move) {
    const bool rare =
        outgrown(peak, rows, unit) || rows.far || args.scale < 0 || (valid.x & valid.y) != ~0u;
    if (__builtin_expect(__any_sync(~0u, rare), 0)) {
      if (args.scale < 0)
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = -s[i];
      rows.rescale[0] = rows.rescale[1] = 1.f;
      if (rare_softmax(s, p, rows, unit, valid)) on_move();
    } else {
      rows.row_max[0] = fmaxf(rows.row_max[0], peak[0]);
      rows.row_max[1] = fmaxf(rows.row_max[1], peak[1]);
      exponentials<false>(s, p, rows, unit);
    }
    if constexpr (Tiles::kTail) bar<kTailReadOf<kWarpgroup>, 128>();
    publish(smem, kWarpgroup, p, rows);
    phase[0] ^= 1;
  };
#pragma unroll 1
  for (int item = blockIdx.x, n = 0; item < args.items; item += gridDim.x, n++) {
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0;
    TwoRows rows;
    mb_wait(&smem.q_full, q_phase);
    q_phase ^= 1;
    const int blocks = smem.blocks;
    const int own_blocks = (blocks + 1 - kWarpgroup) / 2;
    const int pairs = (blocks + 1) / 2;
    if (own_blocks == 0 && lane == 0) mb_arrive(&smem.q_empty);
#pragma unroll 1
    for (int i = 0; i < pairs; i++) {
      if constexpr (kWarpgroup == 0) {
        score(i > 0);
        if (i + 1 == own_blocks && lane == 0) mb_arrive(&smem.q_empty);
        make_weights(rows, [&] { rescale_output(o, rows.rescale[0], rows.rescale[1]); });
        const bool both = 2 * i + 1 < blocks;
        if (both && mb_done(&smem.full[1][0], phase[1])) mb_wait(&smem.scored[1], phase[1]);
        wg_fence();
        multiply_values(o, p, own_v);
        release<0>(smem, 0, 0);
        hold(o);
        if (both) {
          mb_wait(&smem.p_full[1], phase[1]);
          fence_async();
          phase[1] ^= 1;
          follow(smem, 1, o, rows);
          wg_fence();
          multiply_values<true>(o, other_p, other_v);
          // That is past, but no phase may go by without a wait.
          mb_wait(&smem.scored[1], phase[1] ^ 1);
        }
      } else {
        mb_wait(&smem.scored[0], phase[1]);
        const bool both = 2 * i + 1 < blocks;
        if (both) {
          score(false);
          if (i + 1 == own_blocks && lane == 0) mb_arrive(&smem.q_empty);
        }
        mb_wait(&smem.p_full[0], phase[1]);
        fence_async();
        phase[1] ^= 1;
        follow(smem, 0, o, rows);
        wg_fence();
        multiply_values<false>(o, other_p, other_v);
        bool moved = false;
        if (both) make_weights(rows, [&] { moved = true; });
        wg_wait<0>();
        hold(o);
        release<0>(smem, 0, 1);
        if (both) {
          if (__builtin_expect(moved, 0)) rescale_output(o, rows.rescale[0], rows.rescale[1]);
          wg_fence();
          multiply_values(o, p, own_v);
          release<0>(smem, 1, 1);
          hold(o);
        }
      }
    }
    if constexpr (kWarpgroup == 0) {
      wg_wait<0>();
      hold(o);
      if (blocks > 0 && blocks % 2 == 0) release<0>(smem, 1, 0);
    }
    // Computed again: registers are short above.
    Work work = work_at(args, item);
    work.parity = n & 1;
    epilogue<Family, kWarpgroup>(smem, args, work, o, rows);
  }
}

}  // namespace winnow::internal::attend::wide_sm90
