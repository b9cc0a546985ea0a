// Decode on Hopper: S^T = K Q^T with Q as e4m3, from codes as they are stored (Precision::kFp8).
// score() calls it; docs/fp8.md has its budget.
#pragma once

#include "attend/decode_sm90/score.cuh"

namespace winnow::internal::attend::decode_sm90 {

// V3.2's records, for CTAs of 64 heads.
struct CodeRow : RowTraits<V32Fp8> {
  static constexpr bool kCodes = true;
};

// The columns of a scale, a tile, have sums of their own, which are scaled and added to s. The next
// codes are read meanwhile. RoPE's products are under way when it returns.
template <class Row, int kHeads>
__device__ __forceinline__ void multiply_stored_codes(const Smem<Row, kHeads>& smem, int kv_stage,
                                                      uint32_t lane_offset, int row, uint32_t q,
                                                      float (&s)[kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  static_assert(Row::kTile == 128 && Row::kScales == 4 && Row::kSideBytes == 0);
  constexpr int kTileBytes = kHeads * 128;
  const uint32_t q_desc = desc(q, 16);
  const uint32_t rows = s32(smem.ring[kv_stage]) + lane_offset;
  uint32_t a[4][4];
  float sum[kHeads / 2];
  // Of rows r and r + 8.
  float4 scale[2];
  const auto load = [&](int offset) {
#pragma unroll
    for (int step = 0; step < 4; step++) ldsm(a[step], rows + offset + 32 * step);
  };
  load(0);
#pragma unroll
  for (int k = 0; k < 2; k++)
    scale[k] = *reinterpret_cast<const float4*>(smem.ring[kv_stage] +
                                                (row + 8 * k) * Config::kPitch + Row::kScaleOffset);
#pragma unroll
  for (int tile = 0; tile < Row::kScales; tile++) {
    const uint32_t q_tile = fresh(q_desc + (tile * kTileBytes >> 4));
    wg_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_e4m3(sum, a[step], whole_desc<kDescHigh>(q_tile + (step * 32 >> 4)), step);
    wg_commit();
    wg_wait<0>();
    hold(sum);
    load(tile + 1 < Row::kScales ? 128 * (tile + 1) : Row::kRopeOffset);
#pragma unroll
    for (int c = 0; c < kHeads / 2; c++) {
      const float4& of = scale[c >> 1 & 1];
      const float by = tile == 0 ? of.x : tile == 1 ? of.y : tile == 2 ? of.z : of.w;
      s[c] = tile == 0 ? sum[c] * by : fmaf(sum[c], by, s[c]);
    }
  }
  const uint32_t q_rope = fresh(q_desc + (Config::kNopeTiles * kTileBytes >> 4));
  wg_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_rs<kHeads, true, 0>(s, a[step], q_rope + (step * 32 >> 4), 1);
  wg_commit();
}

}  // namespace winnow::internal::attend::decode_sm90
