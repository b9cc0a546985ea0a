// Decode on Hopper: what score and weigh need to know of a block's rows. One copying warp finds it
// when the rows have arrived: each row's lambda (its power of two) and whether it has a token, and
// its scales divided by 2^lambda, as fp16.
#pragma once

#include "attend/decode_sm90/exact.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Stands for the lambda of a record with a scale of 2^67 or more where scales are in P (codes.cuh):
// e4m3 has no room for such a weight, so the record's scores become NaN.
constexpr int kUnfit = 61;

// Describes V3.2's scales of two neighbouring rows: lambda, and scales / 2^lambda as fp16. True if
// one of them is odd (is_odd_scale()).
template <class Row, int kHeads, class Put>
__device__ __forceinline__ bool describe_fp32_scales(const Smem<Row, kHeads>& smem, int kv_stage,
                                                     int row, int (&lambda)[2], Put put) {
  using Config = ConfigOf<Row, kHeads>;
  static_assert(Row::kScales == 4);
  bool odd = false;
  float relative[2][4];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const float4 scale = *reinterpret_cast<const float4*>(
        smem.ring[kv_stage] + (row + k) * Config::kPitch + Row::kScaleOffset);
    const float most =
        fmaxf(fmaxf(fabsf(scale.x), fabsf(scale.y)), fmaxf(fabsf(scale.z), fabsf(scale.w)));
    const float least =
        fminf(fminf(fabsf(scale.x), fabsf(scale.y)), fminf(fabsf(scale.z), fabsf(scale.w)));
    lambda[k] = min(max((int)(__float_as_uint(most) >> 23) - 127 - 6, -60), 60);
    // Weights times such a scale are not in e4m3's range.
    if (Row::kCodes && !(most < 0x1p67f)) lambda[k] = kUnfit;
    const float inverse = pow2i(-lambda[k]);
    relative[k][0] = scale.x * inverse;
    relative[k][1] = scale.y * inverse;
    relative[k][2] = scale.z * inverse;
    relative[k][3] = scale.w * inverse;
    // If the smallest and the largest scale fit, all do.
    if (!(least * inverse >= 0x1p-16f && most * inverse < 128.f))
      odd |= is_odd_scale(scale.x, relative[k][0]) | is_odd_scale(scale.y, relative[k][1]) |
             is_odd_scale(scale.z, relative[k][2]) | is_odd_scale(scale.w, relative[k][3]);
  }
#pragma unroll
  for (int k = 0; k < 4; k++) put(k, pack<false>(relative[0][k], relative[1][k]));
  return odd;
}

// How far the largest fp8 value of a V4 record, at most 448 times its largest scale, lies below
// what fp16 holds, as a power of two. RoPE's values become fp16 too, and may be so much larger
// before lambda has to be raised for them (rope.cuh).
constexpr int kRopeHeadroom = 5;

// The same for V4's scales, powers of two in a byte each, which lie apart from the row. Those below
// 2^(lambda - 24) count as 0.
template <class Row, int kHeads, class Put>
__device__ __forceinline__ void describe_power_scales(const Smem<Row, kHeads>& smem, int kv_stage,
                                                      int row, uint32_t valid, int (&lambda)[2],
                                                      Put put) {
  static_assert(Row::kSideBytes == 8 && Row::kScales == 7);
  uint4 bytes = *reinterpret_cast<const uint4*>(smem.side[kv_stage] + row * 8);
  if (!(valid & 1)) bytes.x = bytes.y = 0;
  if (!(valid & 2)) bytes.z = bytes.w = 0;
  const auto largest = [](uint32_t lo, uint32_t hi) {
    constexpr uint32_t kEven = 0x00ff00ff;
    uint32_t most = __vmaxu2(lo & kEven, hi & kEven);
    most = __vmaxu2(most, __vmaxu2(lo >> 8 & kEven, hi >> 8 & 0xff));
    return static_cast<int>(max(most & 0xffff, most >> 16));
  };
  const int most0 = largest(bytes.x, bytes.y);
  const int most1 = largest(bytes.z, bytes.w);
  lambda[0] = max(most0 - 7 + kRopeHeadroom - 127, -60);
  lambda[1] = max(most1 - 7 + kRopeHeadroom - 127, -60);
  // Two scales at once, 2^13 times as large while they are made: then fp16 has no subnormals among
  // them, and the largest are below 2^16. `minus` leaves fp16's biased exponent of a scale's byte.
  constexpr int kUp = 13;
  static_assert(7 - kRopeHeadroom + kUp <= 15);
  constexpr uint32_t kDown = (15 - kUp) * 0x04000400;
  constexpr int kBias = 127 - 15 - kUp;
  const uint32_t minus = __byte_perm(-kBias - lambda[0], -kBias - lambda[1], 0x5410);
#pragma unroll
  for (int k = 0; k < 7; k++) {
    const uint32_t two = __byte_perm(k < 4 ? bytes.x : bytes.y, k < 4 ? bytes.z : bytes.w,
                                     0x0400 + (k & 3) * 0x0101) &
                         0x00ff00ff;
    put(k, mul_h2(__viaddmax_s16x2(two, minus, 0) << 10, kDown));
  }
  // Rare: a byte of 255 means NaN, which the shift above does not make.
  if (max(most0, most1) == 255) {
    const auto scale = [](uint32_t word, int k, int lambda) {
      const int byte = (word >> (8 * (k & 3))) & 0xff;
      return byte == 255 ? NAN : pow2i(max(byte - 127 - lambda, -126));
    };
#pragma unroll 1
    for (int k = 0; k < 7; k++)
      put(k, pack<false>(scale(k < 4 ? bytes.x : bytes.y, k, lambda[0]),
                         scale(k < 4 ? bytes.z : bytes.w, k, lambda[1])));
  }
}

// Describes a block that has arrived, by one warp. A lane has two neighbouring rows of the block's
// stage lane / 8, which is the ring's stage `kv_stage`.
template <class Row, int kHeads>
__device__ __forceinline__ void describe(Smem<Row, kHeads>& smem, int kv_stage) {
  using Config = ConfigOf<Row, kHeads>;
  const int lane = thread_here() & 31;
  const int stage_of_block = lane >> 3;
  const int row = 2 * (lane & 7);
  const uint32_t valid = smem.valid[kv_stage] >> row;
  int lambda[2] = {0, 0};
  if constexpr (Row::kFp8) {
    uint16_t* to = &smem.scales[kv_stage][0][scale_position(row)];
    const auto put = [&](int k, uint32_t two) {
      if constexpr (!Row::kCodes) *reinterpret_cast<uint32_t*>(to + k * Config::kRows) = two;
    };
    bool odd = false;
    if constexpr (Row::kSideBytes == 0)
      odd = describe_fp32_scales(smem, kv_stage, row, lambda, put);
    else describe_power_scales(smem, kv_stage, row, valid, lambda, put);
    // The RoPE columns are bf16, and so is their factor.
    if constexpr (Config::kRopeFactor)
      put(Row::kScales, (uint32_t)(127 - lambda[0]) << 7 | (uint32_t)(127 - lambda[1]) << 23);
    if constexpr (Config::kHasExactPath) {
      const uint32_t odd_lanes = __ballot_sync(~0u, odd);
      if (row == 0)
        smem.odd_scales[kv_stage] =
            (odd_lanes >> (8 * stage_of_block) & 0xff ? kOddRows : 0) | (odd_lanes ? kOddBlock : 0);
    }
  }
  const auto number = [](int lambda) {
    return Row::kCodes && lambda == kUnfit ? NAN : (float)lambda;
  };
  *reinterpret_cast<float4*>(&smem.row_lambda[kv_stage][row]) =
      make_float4(pow2i(lambda[0]), valid & 1 ? number(lambda[0]) : -INFINITY, pow2i(lambda[1]),
                  valid & 2 ? number(lambda[1]) : -INFINITY);
}

}  // namespace winnow::internal::attend::decode_sm90
