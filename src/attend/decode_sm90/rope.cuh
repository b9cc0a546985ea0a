// Decode on Hopper: V4's RoPE columns, which are values too, become fp16 where they lie in the
// ring.
//
// Score has a stage's RoPE columns in its registers, as bf16 times 2^-lambda. It puts them back as
// fp16, so that weigh takes them as they are, with the weights of all other columns. Lambda was
// chosen for the scales of the other columns. Rows whose RoPE values are too large for it are rare,
// and get a larger lambda here.
#pragma once

#include "attend/decode_sm90/query.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Rare: makes fp16 of the RoPE columns of a stage in which some value is not finite or not below
// 2^(lambda + 16). Each row's lambda grows until its finite values are below that, and its scales,
// which are relative to 2^lambda, shrink by as much. A lane has a row.
template <class Row, int kHeads>
__device__ __noinline__ void raise_lambda(Smem<Row, kHeads>& smem, int kv_stage) {
  using Config = ConfigOf<Row, kHeads>;
  const int row = thread_here() & 31;
  __syncwarp();
  if (row < Config::kRows) {
    auto* const rope =
        reinterpret_cast<uint32_t*>(smem.ring[kv_stage] + row * Config::kPitch + Row::kRopeOffset);
    constexpr int kWords = (Row::kQk - Row::kNope) / 2;
    // The largest exponent of the finite values: adding kOne makes an infinity or a NaN negative.
    constexpr uint32_t kOne = 0x00800080;
    uint32_t most = kOne;
#pragma unroll 1
    for (int k = 0; k < kWords; k++) most = __viaddmax_s16x2(rope[k] & 0x7fff7fff, kOne, most);
    const int exponent = static_cast<int>(max(most >> 16, most & 0xffff) >> 7) - 1 - 127;
    const float2 before = smem.row_lambda[kv_stage][row];
    const int old = static_cast<int>(__float_as_uint(before.x) >> 23) - 127;
    const int lambda = max(old, exponent - 15);
    const uint32_t factor = (127 - lambda) * 0x800080u;
#pragma unroll 1
    for (int k = 0; k < kWords; k++) rope[k] = convert_q(rope[k], factor);
    const float down = pow2i(max(old - lambda, -126));
#pragma unroll 1
    for (int k = 0; k < Row::kScales; k++) {
      auto* const scale = reinterpret_cast<__half*>(&smem.scales[kv_stage][k][scale_position(row)]);
      *scale = __float2half_rn(__half2float(*scale) * down);
    }
    smem.row_lambda[kv_stage][row] =
        make_float2(pow2i(lambda), before.y > -INFINITY ? static_cast<float>(lambda) : -INFINITY);
  }
  __syncwarp();
}

// Puts a warp's 16 rows of RoPE columns, `words` as matrix fragments, back as fp16. False where
// that was not possible, and lambda has been raised.
template <class Row, int kHeads>
__device__ __forceinline__ bool put_rope(Smem<Row, kHeads>& smem, int kv_stage,
                                         uint32_t lane_offset, const uint32_t (&words)[4][4]) {
  uint32_t most = 0;
#pragma unroll
  for (int step = 0; step < 4; step++)
    most = larger(most, make_uint4(words[step][0], words[step][1], words[step][2], words[step][3]));
  // 2^16 as bf16; a NaN is larger.
  constexpr uint32_t kTooLarge = 0x4780;
  if (__any_sync(~0u, max(most & 0x7fff, most >> 16 & 0x7fff) >= kTooLarge)) {
    raise_lambda<Row, kHeads>(smem, kv_stage);
    return false;
  }
  const uint32_t to = s32(smem.ring[kv_stage]) + lane_offset + Row::kRopeOffset;
  const auto half = [](uint32_t two) {
    return pack<false>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000));
  };
#pragma unroll
  for (int step = 0; step < 4; step++)
    stsm4(to + 32 * step, half(words[step][0]), half(words[step][1]), half(words[step][2]),
          half(words[step][3]));
  return true;
}

}  // namespace winnow::internal::attend::decode_sm90
