// Decode on Hopper: S^T = K Q^T of a block, stored as log2 P (score(), at the end of this file).
// A warp has 16 rows of the block, one stage. It reads them as A fragments; the heads of Q are on
// the N side. Four forms of the product differ in where V3.2's and V4's scales are multiplied:
//
//   scaled_sums()             fp8, up to 16 heads         sums over a scale's columns
//   multiply_codes()          V3.2 fp8, 17 to 32 heads    growing sums, by the ratio of two scales
//   multiply_stored_codes()   e4m3 products, 64 heads     sums over a scale's columns
//   multiply_keys()           all others                  rows, before the product (bf16: none)
//
// In each the next columns are read and converted while the matrix unit works on the last ones:
// wg_wait<1>() leaves the newest group of products under way and frees the fragments of the one
// before.
#pragma once

#include "attend/decode_sm90/exact.cuh"
#include "attend/decode_sm90/rope.cuh"

namespace winnow::internal::attend::decode_sm90 {

// S^T of a warp's 16 rows in a stage, times `unit`. Columns that share a scale have a sum of their
// own. One of two sums grows while the other, of the columns before, is scaled and added to s. With
// few heads that is fewer instructions than scaling the rows, and exact whatever V3.2's scales are.
template <class Row, int kHeads>
__device__ __forceinline__ void scaled_sums(Smem<Row, kHeads>& smem, int kv_stage, float unit,
                                            float (&s)[kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  const int lane = thread_here() & 31;
  const int row = lane >> 2;
  // Groups of 64 columns, and how many of them share a scale.
  constexpr int kGroups = Row::kNope / 64;
  constexpr int kGroupsPerScale = Row::kTile / 64;
  const uint32_t lane_offset =
      ((lane & 7) + 8 * ((lane >> 3) & 1)) * Config::kPitch + (lane >> 4) * 16;
  uint32_t rows = s32(smem.ring[kv_stage]) + lane_offset;
  // From lane 0, so that the compiler knows it as uniform.
  const uint32_t q_desc = __shfl_sync(~0u, desc(s32(smem.q), 16), 0);
  // Fragments of two groups; the stored codes of the next group, and at last RoPE's columns.
  uint32_t a[2][4][4];
  uint32_t raw[4][4];
  float sum[2][kHeads / 2];
  // The scales of rows r and r + 8, times unit. V3.2's are read from the row as they are stored;
  // V4's are fp16 in smem.scales, relative to 2^lambda, and `halves` is 2^lambda times unit.
  float4 stored[2];
  float2 halves{};
  const uint16_t* scale_halves = &smem.scales[kv_stage][0][scale_position(row)];
  if constexpr (Row::kSideBytes == 0) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float4 v = *reinterpret_cast<const float4*>(
          smem.ring[kv_stage] + (row + 8 * k) * Config::kPitch + Row::kScaleOffset);
      stored[k] = make_float4(v.x * unit, v.y * unit, v.z * unit, v.w * unit);
    }
  } else {
    halves = make_float2(smem.row_lambda[kv_stage][row].x * unit,
                         smem.row_lambda[kv_stage][row + 8].x * unit);
  }
  // The scales of tile `tile` (the columns that share a scale), of both rows.
  const auto scales_of = [&](int tile) {
    if constexpr (Row::kSideBytes == 0) {
      const auto of = [&](const float4& v) {
        return tile == 0 ? v.x : tile == 1 ? v.y : tile == 2 ? v.z : v.w;
      };
      return make_float2(of(stored[0]), of(stored[1]));
    } else {
      const __half* from = reinterpret_cast<const __half*>(scale_halves + tile * Config::kRows);
      return make_float2(__half2float(from[0]) * halves.x, __half2float(from[2]) * halves.y);
    }
  };
  // Adds the finished sum of a tile to s, times its scales.
  const auto add = [&](int tile, float2 scale) {
    float(&from)[kHeads / 2] = sum[tile & 1];
    hold(from);
#pragma unroll
    for (int c = 0; c < kHeads / 2; c++)
      s[c] = tile == 0 ? from[c] * (c & 2 ? scale.y : scale.x)
                       : fmaf(from[c], c & 2 ? scale.y : scale.x, s[c]);
  };
  // Issues the products of a group of 64 columns; keep: 0 begins a sum.
  const auto multiply = [&](auto kind, uint32_t(&f)[4][4], int group, float(&to)[kHeads / 2],
                            int keep) {
    const uint32_t q = fresh(q_desc + (group * kHeads * 128 >> 4));
    wg_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_rs<kHeads, decltype(kind)::value, 0>(to, f[step], q + (step * 32 >> 4), keep || step);
    wg_commit();
  };
  ldsm(raw[0], rows);
  ldsm(raw[1], rows + 32);
#pragma unroll
  for (int group = 0; group < kGroups; group++) {
    const int tile = group / kGroupsPerScale;
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint32_t(&f)[4] = a[group & 1][step];
      e4m3x4(raw[step / 2][step % 2 * 2], f[0], f[2]);
      e4m3x4(raw[step / 2][step % 2 * 2 + 1], f[1], f[3]);
    }
    const bool last = group + 1 == kGroups;
    rows += last ? 64 + Row::kRopeOffset - Row::kNope : 64;
    ldsm(raw[0], rows);
    ldsm(raw[1], rows + 32);
    float2 scale{};
    if (group % kGroupsPerScale == 0 && group > 0) scale = scales_of(tile - 1);
    multiply(std::false_type{}, a[group & 1], group, sum[tile & 1], group % kGroupsPerScale);
    wg_wait<1>();
    if (group % kGroupsPerScale == 0 && group > 0) add(tile - 1, scale);
  }
  // RoPE: its rows are fragments as they are.
  ldsm(raw[2], rows + 64);
  ldsm(raw[3], rows + 96);
  const float2 scale = scales_of(Row::kScales - 1);
  multiply(std::true_type{}, raw, kGroups, sum[Row::kScales & 1], 0);
  wg_wait<1>();
  add(Row::kScales - 1, scale);
  // V4: put RoPE's columns back as fp16 for weigh.
  if constexpr (Config::kRopeInV) {
    uint32_t rope[4][4];
    const uint32_t factor0 = twice(scale_halves[Row::kScales * Config::kRows]);
    const uint32_t factor1 = twice(scale_halves[Row::kScales * Config::kRows + 2]);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int k = 0; k < 4; k++) rope[step][k] = mul_b2(raw[step][k], k & 1 ? factor1 : factor0);
    put_rope<Row, kHeads>(smem, kv_stage, lane_offset, rope);
  }
  wg_wait<0>();
  add(Row::kScales, make_float2(unit, unit));
}

// Within one unit in the last place, for normal values.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// What the sums of a row are multiplied by after the columns of each scale: the scale over the next
// one, and at last the last scale itself. A scale that is far below the largest one counts as 2^-60
// of that, so that ratios stay finite. Without odd scales (is_odd_scale()) only one below 2^-100
// can be so small.
__device__ __forceinline__ void ratios_of(const float4& scales, float (&ratio)[4]) {
  const float most =
      fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
  const float least = fmaxf(most * 0x1p-60f, 0x1p-126f);
  // A NaN stays one.
  const auto bounded = [&](float scale) { return fabsf(scale) < least ? least : scale; };
  const float y = bounded(scales.y);
  const float z = bounded(scales.z);
  ratio[3] = bounded(scales.w);
  ratio[0] = bounded(scales.x) * reciprocal(y);
  ratio[1] = y * reciprocal(z);
  ratio[2] = z * reciprocal(ratio[3]);
}

// S^T of a warp's 16 rows in a stage, in groups of 64 columns, from codes that are not scaled,
// which are exact in fp16: after two groups, which share a scale, the sums are multiplied by its
// ratio to the next one. The next group's fragments are made while this one multiplies. RoPE's
// products are under way when it returns.
//
// The sums are multiplied when no products are under way, which costs less than scaling the rows
// where two warpgroups score. With more than 32 heads there is one, and it would cost more.
template <class Row, int kHeads>
__device__ __forceinline__ void multiply_codes(const Smem<Row, kHeads>& smem, int kv_stage,
                                               uint32_t lane_offset, int row, uint32_t q,
                                               float (&s)[kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  constexpr int kGroups = Row::kNope / 64;
  static_assert(Row::kTile == 128 && Row::kScales == 4 && Row::kSideBytes == 0);
  const uint32_t q_desc = desc(q, 16);
  const uint32_t rows = s32(smem.ring[kv_stage]) + lane_offset;
  uint32_t a[2][4][4];
  uint32_t raw[2][4];
  // Of rows r and r + 8.
  float ratio[2][4];
  const auto load = [&](int group) {
    ldsm(raw[0], rows + 64 * group);
    ldsm(raw[1], rows + 64 * group + 32);
  };
  const auto convert = [&](int group) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint32_t(&f)[4] = a[group & 1][step];
      e4m3x4(raw[step / 2][step % 2 * 2], f[0], f[2]);
      e4m3x4(raw[step / 2][step % 2 * 2 + 1], f[1], f[3]);
    }
  };
  const auto multiply = [&](auto bf16, int group) {
    const uint32_t q_group = fresh(q_desc + (group * kHeads * 128 >> 4));
    wg_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_rs<kHeads, decltype(bf16)::value, 0>(s, a[group & 1][step], q_group + (step * 32 >> 4),
                                                 group || step);
    wg_commit();
  };
  load(0);
  convert(0);
  load(1);
#pragma unroll
  for (int scale = 0; scale < Row::kScales; scale++) {
    const int group = 2 * scale;
    multiply(std::false_type{}, group);
    if (scale == 0)
#pragma unroll
      for (int k = 0; k < 2; k++)
        ratios_of(*reinterpret_cast<const float4*>(
                      smem.ring[kv_stage] + (row + 8 * k) * Config::kPitch + Row::kScaleOffset),
                  ratio[k]);
    convert(group + 1);
    if (group + 2 < kGroups) load(group + 2);
    multiply(std::false_type{}, group + 1);
    // The first group's fragments are free.
    wg_wait<1>();
    if (group + 2 < kGroups) {
      convert(group + 2);
      load(group + 3);
    } else {
#pragma unroll
      for (int step = 0; step < 4; step++) ldsm(a[0][step], rows + Row::kRopeOffset + 32 * step);
    }
    wg_wait<0>();
    hold(s);
#pragma unroll
    for (int c = 0; c < kHeads / 2; c++) s[c] *= ratio[c >> 1 & 1][scale];
  }
  multiply(std::true_type{}, kGroups);
}

// S^T from codes that are multiplied as they are stored, defined in score_codes.cuh. RoPE's
// products are under way when it returns.
template <class Row, int kHeads>
__device__ void multiply_stored_codes(const Smem<Row, kHeads>& smem, int kv_stage,
                                      uint32_t lane_offset, int row, uint32_t q,
                                      float (&s)[kHeads / 2]);

// S^T of a warp's 16 rows in a stage, in groups of 64 columns: the next group's fragments are made
// while this one multiplies. The last products are under way when it returns.
//
// Returns 0. But if V4's RoPE values did not fit and raised the rows' lambda, S still has the old
// one: then it returns the old 2^-lambda of rows r and r + 8, two bf16.
template <class Row, int kHeads>
__device__ __forceinline__ uint32_t multiply_keys(Smem<Row, kHeads>& smem, int kv_stage,
                                                  uint32_t lane_offset, int row, uint32_t q,
                                                  float (&s)[kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  constexpr int kGroups = Row::kQk / 64;
  constexpr int kFp8Groups = Row::kFp8 ? Row::kNope / 64 : 0;
  constexpr int kGroupsPerScale = Row::kFp8 ? Row::kTile / 64 : 1;
  const uint32_t base = s32(smem.ring[kv_stage]) + lane_offset;
  const uint16_t* scales = &smem.scales[kv_stage][0][scale_position(row)];
  uint32_t a[2][4][4];
  uint32_t raw[2][4];
  // The scales of the next group, of rows r and r + 8.
  uint32_t next_scale0 = 0;
  uint32_t next_scale1 = 0;
  uint32_t rows = base;
  uint32_t q_desc = desc(q, 16);
  auto load = [&](uint32_t from, int scale) {
    ldsm(raw[0], from);
    ldsm(raw[1], from + 32);
    if (scale >= 0) {
      next_scale0 = twice(scales[scale * Config::kRows]);
      next_scale1 = twice(scales[scale * Config::kRows + 2]);
    }
  };
  auto multiply = [&](auto bf16, int group, int keep) {
    const uint32_t q_group = fresh(q_desc + (group * kHeads * 128 >> 4));
    wg_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_rs<kHeads, decltype(bf16)::value, 0>(s, a[group & 1][step], q_group + (step * 32 >> 4),
                                                 keep || step);
    wg_commit();
    wg_wait<1>();
  };
  if constexpr (Row::kFp8) {
    // The second half of RoPE's rows. kEarly of its two loads come before the last group's
    // products.
    constexpr int kEarly = Row::kTile == 64 ? 1 : 2;
    uint32_t rope[2][4];
    // Scales and multiplies group 0 or 1 of the turn that begins at `rows`, and reads the next
    // group, whose rows are at `next`.
    auto multiply_group = [&](int group, uint32_t next, int keep, bool last = false) {
      uint32_t(&f)[4][4] = a[group & 1];
      const uint32_t scale0 = next_scale0;
      const uint32_t scale1 = next_scale1;
#pragma unroll
      for (int step = 0; step < 4; step++) {
        uint32_t e0, e1, e2, e3;
        e4m3x4(raw[step / 2][step % 2 * 2], e0, e2);
        e4m3x4(raw[step / 2][step % 2 * 2 + 1], e1, e3);
        f[step][0] = mul_h2(e0, scale0);
        f[step][1] = mul_h2(e1, scale1);
        f[step][2] = mul_h2(e2, scale0);
        f[step][3] = mul_h2(e3, scale1);
      }
      load(next, (group + 1) % kGroupsPerScale == 0 ? (group + 1) / kGroupsPerScale : -1);
      if (last)
#pragma unroll
        for (int k = 0; k < kEarly; k++) ldsm(rope[k], next + 64 + 32 * k);
      multiply(std::false_type{}, group, keep);
    };
    load(base, 0);
    // A turn takes two groups, so that both buffers of fragments have constant indices.
    constexpr int kTurns = kFp8Groups / 2;
    // Bytes of a record between its codes and its RoPE columns.
    constexpr int kSkip = Row::kRopeOffset - Row::kNope;
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      multiply_group(0, rows + 64, turn);
      const bool last = kFp8Groups % 2 == 0 && turn == kTurns - 1;
      multiply_group(1, rows + 128 + (last ? kSkip : 0), 1, last);
      rows += 128;
      scales += 2 / kGroupsPerScale * Config::kRows;
      q_desc += 2 * kHeads * 128 >> 4;
    }
    if constexpr (kFp8Groups % 2) multiply_group(0, rows + 64 + kSkip, 1, true);
    // RoPE: the first half of its rows is in `raw`.
    constexpr int kRopeGroup = kFp8Groups % 2;
    uint32_t(&f)[4][4] = a[kRopeGroup];
    rows += kRopeGroup * 64 + kSkip;
#pragma unroll
    for (int k = kEarly; k < 2; k++) ldsm(rope[k], rows + 64 + 32 * k);
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        f[step][k] =
            mul_b2(step < 2 ? raw[step][k] : rope[step - 2][k], k & 1 ? next_scale1 : next_scale0);
    multiply(std::true_type{}, kRopeGroup, 1);
    if (Config::kRopeInV && !put_rope<Row, kHeads>(smem, kv_stage, lane_offset, f))
      return __byte_perm(next_scale0, next_scale1, 0x5410);
  } else {
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
#pragma unroll
      for (int step = 0; step < 4; step++) ldsm(a[group & 1][step], rows + group * 128 + step * 32);
      multiply(std::true_type{}, group, group);
    }
  }
  return 0;
}

// Scores of a stage with odd scales, from Q as the caller stores it: lambda becomes 0, and 2^lambda
// becomes 1 / q_unit, which takes the scale of the Q in shared memory out of `unit` again.
template <class Row, int kHeads>
__device__ __forceinline__ void score_exactly(Smem<Row, kHeads>& smem, const Args& args, int token,
                                              int kv_stage, int thread, float q_unit,
                                              float2& lambda0, float2& lambda1,
                                              float (&s)[kHeads / 2]) {
  using Config = ConfigOf<Row, kHeads>;
  const int lane = thread & 31;
  const int row = lane >> 2;
  if constexpr (!Config::kScaledSums) exact_scores<Row, kHeads>(smem, args, token, kv_stage);
  lambda0 = make_float2(1 / q_unit, lambda0.y > -INFINITY ? 0.f : -INFINITY);
  lambda1 = make_float2(1 / q_unit, lambda1.y > -INFINITY ? 0.f : -INFINITY);
  __syncwarp();
  if ((lane & 3) == 0) {
    smem.row_lambda[kv_stage][row] = lambda0;
    smem.row_lambda[kv_stage][row + 8] = lambda1;
  }
  if constexpr (!Config::kScaledSums)
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++) {
      const float4 v = smem.log2_p[j][thread];
      s[4 * j] = v.x;
      s[4 * j + 1] = v.y;
      s[4 * j + 2] = v.z;
      s[4 * j + 3] = v.w;
    }
}

// Scores a token's blocks, from progress.block on; `progress` moves past them. A warp's first stage
// is progress.kv_stage. `q_unit`: what products with Q are to be multiplied by. Of two score
// warpgroups each takes every other block of the CTA.
template <class Row, int kHeads>
__device__ __forceinline__ void score(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                      float q_unit, Progress& progress) {
  using Config = ConfigOf<Row, kHeads>;
  const int thread = thread_here() & 127;
  const int lane = thread & 31;
  const int row = lane >> 2;
  // Turns S into log2 P.
  const float unit = args.scale * kLog2e * q_unit;
  float s[kHeads / 2];
  // With two warpgroups from lane 0, so that the compiler knows it as uniform.
  const uint32_t q = Config::kScoreWarpgroups == 1 ? s32(smem.q) : __shfl_sync(~0u, s32(smem.q), 0);
  const uint32_t lane_offset =
      ((lane & 7) + 8 * ((lane >> 3) & 1)) * Config::kPitch + (lane >> 4) * 16;
  const int block_end = progress.block + span.blocks;
  const int stage_end = (progress.kv_stage + 4 * span.blocks) % Config::kStages;
  const auto advance = [](int stage, int count) {
    return stage + count < Config::kStages ? stage + count : stage + count - Config::kStages;
  };
  int next_stage = progress.kv_stage;
  int i = progress.block;
  // The other warpgroup takes this block.
  if (Config::kScoreWarpgroups == 2 && ((thread_here() / 128 ^ i) & 1)) {
    next_stage = advance(next_stage, 4);
    i++;
  }
#pragma unroll 1
  for (; i < block_end; i += Config::kScoreWarpgroups) {
    // Wait until the block is described, then multiply.
    mb_wait(&smem.block_ready[i % kReady], (i / kReady) & 1);
    // The old 2^-lambda of this warp's rows if multiply_keys() has raised lambda.
    uint32_t raised = 0;
    if constexpr (Row::kCodes)
      multiply_stored_codes<Row, kHeads>(smem, next_stage, lane_offset, row, q, s);
    else if constexpr (Config::kScaledSums) scaled_sums<Row, kHeads>(smem, next_stage, unit, s);
    else if constexpr (Config::kRescaledSums)
      multiply_codes<Row, kHeads>(smem, next_stage, lane_offset, row, q, s);
    else raised = multiply_keys<Row, kHeads>(smem, next_stage, lane_offset, row, q, s);
    const int kv_stage = next_stage;
    next_stage = advance(next_stage, 4 * Config::kScoreWarpgroups);
    // Wait until weigh has read log2 P of the last block, and has moved the reference if that was
    // needed.
    if (i >= 1) mb_wait(&smem.log2_p_empty[(i - 1) & 1], ((i - 1) >> 1) & 1);
    float2 lambda0 = smem.row_lambda[kv_stage][row];
    float2 lambda1 = smem.row_lambda[kv_stage][row + 8];
    float2 reference[kHeads / 8];
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++)
      reference[j] = *reinterpret_cast<const float2*>(&smem.reference[8 * j + 2 * (lane & 3)]);
    if (Config::kRopeInV && raised) {
      lambda0.x = pow2i(127 - static_cast<int>(raised >> 7 & 0xff));
      lambda1.x = pow2i(127 - static_cast<int>(raised >> 23));
    }
    // Sums that have been multiplied by whole scales lack no power of two.
    if constexpr (Config::kRescaledSums || Row::kCodes) lambda0.x = lambda1.x = 1;
    bool odd_rows = false;
    if constexpr (Config::kHasExactPath) odd_rows = smem.odd_scales[kv_stage] & kOddRows;
    // Wait for the products.
    wg_wait<0>();
    hold(s);
    if constexpr (Config::kHasExactPath)
      if (odd_rows)
        score_exactly<Row, kHeads>(smem, args, span.token, kv_stage, thread, q_unit, lambda0,
                                   lambda1, s);
    // Store log2 P = log2(e^s * 2^lambda) - reference; a row without a token gives -inf. The first
    // term is rounded before the reference, which is such a term, is subtracted: equal ones stay
    // equal however large they are.
    const float unit0 = Config::kScaledSums ? 1 : unit * lambda0.x;
    const float unit1 = Config::kScaledSums ? 1 : unit * lambda1.x;
    float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& v = s[4 * j + e];
        v = fmaf(v, e < 2 ? unit0 : unit1, e < 2 ? lambda0.y : lambda1.y) -
            (e & 1 ? reference[j].y : reference[j].x);
        most[e] = max_nan(most[e], v);
      }
      smem.log2_p[j][thread] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
    }
    // Too far above the reference, or NaN: weigh has to move the reference.
    if (!(max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3])) <= kLag<Row>))
      smem.outgrown[i & 1] = 1;
    mb_arrive(&smem.log2_p_full);
  }
  progress = {stage_end, block_end};
}

}  // namespace winnow::internal::attend::decode_sm90
