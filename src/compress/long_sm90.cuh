// compress on the device, C128A: what its prefills (long_sm90.cu) and its decodes
// (long_decode_sm90.cu) share, so that both give the same bits. A group is 16 rows of an entry. Of
// its even and of its odd rows the first four and the last four are pooled alone and joined, then
// even and odd ones, then the groups, in ascending order.
#pragma once

#include <cuda_runtime.h>

#include "compress/many_sm90.cuh"

namespace winnow::internal::compress::many {

using R = V4Fp8;
inline constexpr int kWindow = 128;
inline constexpr int kGroupRows = 16;
inline constexpr int kGroups = kWindow / kGroupRows;
inline constexpr int kScores = R::kDim;  // where a row's scores begin
inline constexpr int kAtOnce = 4;        // rows of a lane that are pooled at once

// What the compiler may know of a call; it leaves the rest where it is.
__device__ __forceinline__ Call known(const Call& call) {
  Call of = call;
  of.p.ratio = kWindow;
  of.p.width = R::kDim;
  of.p.overlap = false;
  of.p.rows_are_bf16 = false;
  return of;
}

// The entry's row that a lane has found for its warp.
struct LongRow {
  const float* from = nullptr;
  float* place = nullptr;  // where it is stored, too
  bool called = false;
};

// Calls f(std::integral_constant<int, i>) for i = 0 to kCount - 1.
template <int kCount, int kFirst = 0, class F>
__device__ __forceinline__ void static_for(F f) {
  if constexpr (kFirst < kCount) {
    f(std::integral_constant<int, kFirst>());
    static_for<kCount, kFirst + 1>(f);
  }
}

// The pools of all groups, of kWidth values.
template <int kWidth>
struct GroupPools {
  float4 largest[kGroups][kWidth / kQuad];
  float4 whole[kGroups][kWidth / kQuad];
  float4 sum[kGroups][kWidth / kQuad];

  __device__ __forceinline__ void put(int group, int quad, const QuadPool& pool) {
    const Pool(&of)[kQuad] = pool.of;
    largest[group][quad] = {of[0].largest, of[1].largest, of[2].largest, of[3].largest};
    whole[group][quad] = {of[0].whole, of[1].whole, of[2].whole, of[3].whole};
    sum[group][quad] = {of[0].sum, of[1].sum, of[2].sum, of[3].sum};
  }
  // The value of a column.
  __device__ __forceinline__ float joined(int column) const {
    const auto part = [&](const float4(&of)[kGroups][kWidth / kQuad], int group) {
      return reinterpret_cast<const float*>(of[group])[column];
    };
    float most = part(largest, 0);
#pragma unroll
    for (int g = 1; g < kGroups; ++g) most = fmaxf(most, part(largest, g));
    Pool all{most, 0, 0};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float weight = exp_of(__fsub_rn(part(largest, g), most));
      all.whole = __fmaf_rn(part(whole, g), weight, all.whole);
      all.sum = __fmaf_rn(part(sum, g), weight, all.sum);
    }
    return quotient_of(all);
  }
};

// The sums of the squares of an entry's values, 32 of them each, which its blocks send each other.
struct Squares {
  float of[R::kDim / 32];
  __device__ __forceinline__ float sum() const {
    float sums[R::kDim / 64];
#pragma unroll
    for (int r = 0; r < R::kDim / 64; ++r) sums[r] = __fadd_rn(of[2 * r], of[2 * r + 1]);
    return __fadd_rn(cuda::joined(sums[0], sums[1], sums[2], sums[3]),
                     cuda::joined(sums[4], sums[5], sums[6], sums[7]));
  }
};

// C128A's calls of one token a cluster: of usual calls with a state.
void long_decode(const Call& call) noexcept;

}  // namespace winnow::internal::compress::many
