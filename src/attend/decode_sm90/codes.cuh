// Decode on Hopper: P and V as e4m3 (Precision::kFp8, docs/fp8.md). V's codes are multiplied as
// they are stored, so V's scales are multiplied into P: there is one P for every scale's columns.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// P of a scale: for each head 64 bytes, one a row, with a 64-byte swizzle. The rows of a stage are
// in the order 0, 8, 1, 9, ... in which a thread has them.
constexpr int kCodePBytes = 64 * 64;
// Upper half of its descriptor: eight heads are 512 bytes, 64-byte swizzle.
constexpr uint32_t kCodePDescHigh = 512 / 16 | 2u << 30;

// Stores a warpgroup's weights of 32 heads, times V's scales. `p` and `scale` are those of rows r
// and r + 8, as weigh has them; inverse0 and inverse1 are 2^-lambda of these rows, since the
// weights contain 2^lambda.
template <class Row, int kHeads>
__device__ __forceinline__ void store_code_weights(Smem<Row, kHeads>& smem, int first_eight,
                                                   const float4 (&scale)[2], float inverse0,
                                                   float inverse1, const float (&p)[16]) {
  static_assert(kHeads == 64 && sizeof smem.p == Row::kScales * kCodePBytes);
  const int thread = thread_here();
  const int head = 8 * first_eight + (thread & 31);
  const int warp = thread / 32 & 3;
  const uint32_t to = s32(smem.p) + head * 64 + ((warp ^ (head >> 1 & 3)) << 4);
#pragma unroll
  for (int tile = 0; tile < Row::kScales; tile++) {
    const auto of = [tile](const float4& v) {
      return tile == 0 ? v.x : tile == 1 ? v.y : tile == 2 ? v.z : v.w;
    };
    const float by0 = of(scale[0]) * inverse0;
    const float by1 = of(scale[1]) * inverse1;
    const auto eight = [&](int j) {
      return pack_e4m3(p[4 * j] * by0, p[4 * j + 2] * by1, p[4 * j + 1] * by0, p[4 * j + 3] * by1);
    };
    stsm4_t(to + tile * kCodePBytes, eight(0), eight(1), eight(2), eight(3));
  }
}

// Turns what ldmatrix.trans has of 16 rows and 16 columns, rows 0 to 7 and 8 to 15, into the halves
// of an A fragment: the even columns, then the odd ones. Volatile, so that it stays before the
// fence of the products that read it (C7519).
__device__ __forceinline__ void interleave(uint32_t low, uint32_t high, uint32_t& even,
                                           uint32_t& odd) {
  asm volatile("prmt.b32 %0,%2,%3,0x6240;\nprmt.b32 %1,%2,%3,0x7351;"
               : "=&r"(even), "=r"(odd)
               : "r"(low), "r"(high));
}

}  // namespace winnow::internal::attend::decode_sm90
