// Wide attention on Hopper: the softmax of a block, as one warpgroup makes it of its scores.
//
// Logits are in log2 units. A row's reference is the maximum of its first block and moves only when
// a logit exceeds it by kLag: P in bf16 and sums in fp32 are as exact with an old reference, and no
// lanes communicate.
#pragma once

#include <cfloat>

#include "attend/wide_sm90/layout.cuh"

namespace winnow::internal::attend::wide_sm90 {

// How far a logit may exceed its row's reference before the reference moves.
constexpr float kLag = 8.f;
// 2^24. References beyond it are far: see TwoRows::set_reference().
constexpr float kFar = 16777216.f;

// What products are multiplied by to become logits in log2 units. It is not 0 even for a scale of
// 0, since 0 times a masked score of -inf would be NaN. A negative scale's sign is applied to the
// scores: prepare_rare().
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
  // Whether a reference is far.
  bool far = false;

  // Sets a reference. Beyond 2^24 a logit's rounding is no longer small against kLag, and the
  // exponent must be the difference of two rounded logits; below, one fused operation is exact
  // enough.
  __device__ void set_reference(int i, float logit) {
    reference[i] = logit;
    far = far || fabsf(logit) > kFar;
  }
};

// Moves the reference of rows whose logits outgrew it. `peak`: this thread's maxima. In a row with
// +inf that weighs 1 and finite logits nothing: the infinite scores become 2^n and the reference
// unit * 2^n, far above the others.
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
      rows.set_reference(i, logit);
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
template <bool kFromFar>
__device__ __forceinline__ void exponentials(const float (&s)[32], uint32_t (&p)[16], TwoRows& rows,
                                             float unit) {
  const auto weight = [&](float x, float reference) {
    return ex2(kFromFar ? __fsub_rn(__fmul_rn(x, unit), reference) : fmaf(x, unit, -reference));
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

// Whether a thread's maxima are so near zero that references made of them are not far.
__device__ __forceinline__ bool near(const float (&peak)[2], float unit) {
  return fabsf(peak[0] * unit) <= kFar && fabsf(peak[1] * unit) <= kFar;
}

// The same as move_reference(), where all maxima are near() and finite, as in most rows' first
// block. True where sums before this block are to be rescaled.
__device__ __forceinline__ bool move_near(const float (&peak)[2], float unit, TwoRows& rows) {
  bool earlier = false;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float logit = peak[i] * unit;
    logit = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
    logit = fmaxf(logit, __shfl_xor_sync(~0u, logit, 2));
    const bool moves = logit > rows.reference[i] + kLag;
    earlier = earlier || (moves && rows.reference[i] > -FLT_MAX);
    rows.rescale[i] = moves ? ex2(rows.reference[i] - logit) : 1.f;
    rows.row_sum[i] *= rows.rescale[i];
    if (moves) rows.reference[i] = logit;
  }
  return __any_sync(~0u, earlier);
}

// Prepares scores for exponentials() in the rare cases: rows without a token, a negative scale,
// logits that are infinite or far from zero. True where this warp moved a reference.
__device__ __forceinline__ bool prepare_rare(float (&s)[32], float (&peak)[2], TwoRows& rows,
                                             float unit, uint2 valid, bool negative) {
  const int quad = threadIdx.x & 3;
  if (negative)
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = -s[i];
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (!((j < 4 ? valid.x : valid.y) >> (8 * (j & 3) + 2 * quad + e) & 1))
        s[4 * j + e] = s[4 * j + e + 2] = -INFINITY;
  find_peaks(s, peak);
  rows.rescale[0] = rows.rescale[1] = 1.f;
  const bool moved = __any_sync(~0u, outgrown(peak, rows, unit));
  if (moved) move_reference(s, peak, unit, rows);
  return moved;
}

}  // namespace winnow::internal::attend::wide_sm90
