// attend_mha by wgmma on the device: which rows a token sees, and one row of the result done by one
// warp in plain arithmetic, for what the fast path cannot represent.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <type_traits>

#include "core/formats.h"
#include "mha/dense_sm90.h"
#include "mha/dense_sm90_sets.cuh"

namespace winnow::internal::mha::dense {

struct Range {
  int32_t first, last;  // rows of k and v, [first, last)
};
__device__ inline Range range_of(const Params& p, int64_t t) {
  const int64_t start = start_of(p, t), end = min(start + length_of(p, t), p.rows);
  const int64_t first = max(start, int64_t{0});
  return end > first ? Range{static_cast<int32_t>(first), static_cast<int32_t>(end)} : Range{0, 0};
}

// A token's bits of blocks of 64 rows from `low` on, as far as they are whole words: where they
// are, and how many.
__device__ inline const uint64_t* words_of(const Task& task, int64_t t, int64_t low, int& count) {
  const Params& p = task.p;
  count = 0;
  if (!p.bits || !task.whole_words || t >= p.tokens) return nullptr;
  const int64_t id = low - start_of(p, t);
  if (id < 0 || id % 64 != 0) return nullptr;
  count = static_cast<int>(max(min((p.bits_width - id / 8) / 8, int64_t{INT_MAX}), int64_t{0}));
  return reinterpret_cast<const uint64_t*>(p.bits + t * p.bits_stride) + id / 64;
}

// A row of the result by one warp: logits and sums in fp32, one key after the other. The warp's
// tokens in `set`, where there are any, are room for the bits of this one.
template <class Set>
__device__ __noinline__ void attend_row(const Task& task, int64_t t, int64_t head, Set& set) {
  const Params& p = task.p;
  constexpr int kColumns = kValueDim / 32, kParts = kKeyDim / 32;
  const int lane = threadIdx.x % 32;
  const bf16* q = p.q + t * p.q_token_stride + head * p.q_head_stride;
  const Range range = range_of(p, t);
  float max = -FLT_MAX, sum = 0, out[kColumns] = {};
  for (int32_t row = range.first; row < range.last; ++row) {
    if constexpr (std::is_same_v<Set, Sets>) {
      constexpr int kWords = 16 * sizeof(set.bits[0]) / 4 / 32 * 32;
      const int at = (row - range.first) % (32 * kWords);
      auto* words = reinterpret_cast<uint32_t*>(set.bits[threadIdx.x / 32 * 16]);
      __syncwarp();  // they are not read any more
      if (at == 0) sm90::set_bits(p, {t, 1, words, kWords}, {row, kWords});
      if (!(words[at / 32] >> at % 32 & 1)) continue;
    } else if (row_of(p, t, row - start_of(p, t)) < 0) {
      continue;
    }
    const bf16* k = p.k + row * p.k_row_stride + head * p.k_head_stride;
    const bf16* v = p.v + row * p.v_row_stride + head * p.v_head_stride;
    float x = 0;
    for (int i = 0; i < kParts; ++i)
      x = fmaf(to_float(q[lane + 32 * i]), to_float(k[lane + 32 * i]), x);
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    x *= p.scale;
    if (x > FLT_MAX) x = FLT_MAX;  // an infinity weighs 1; NaN stays
    const float before = max;
    max = fmaxf(max, x);
    const float keep = expf(before - max), weight = expf(x - max);
    sum = sum * keep + weight;
    for (int i = 0; i < kColumns; ++i)
      out[i] = fmaf(weight, to_float(v[lane + 32 * i]), out[i] * keep);
  }
  const float whole = sum + (p.sink ? expf(p.sink[head] - max) : 0.0f);
  for (int i = 0; i < kColumns; ++i)
    p.out[t * p.out_token_stride + head * p.out_head_stride + lane + 32 * i] =
        to_bf16(sum == 0 ? 0.0f : out[i] / whole);
  if (p.lse && lane == 0)
    p.lse[t * p.lse_token_stride + head * p.lse_head_stride] =
        sum == 0 ? p.empty_lse : max + logf(sum);
}

}  // namespace winnow::internal::mha::dense
