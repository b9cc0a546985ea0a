// Wide attention on Hopper: scores, softmax and weighted sums, by two warpgroups in turn.
//
// The tensor core's order for a pair of blocks is QK a, QK b, PV a, PV b: softmax of a runs under
// QK b, softmax of b under PV a, the copies of the next a under PV b. The barriers that keep it:
//
//   warpgroup 0                              warpgroup 1
//   score a, arrive at scored[0]             wait for scored[0], score b, arrive at scored[1]
//   P of a, arrive at p_full[0]
//   wait for scored[1] if b's rows came
//   O += P a (from registers)                wait for p_full[0], O += P a (from shared memory)
//                                            P of b, arrive at p_full[1]
//   wait for p_full[1], O += P b             O += P b (from registers)
#pragma once

#include "attend/wide_sm90/finish.cuh"
#include "cuda/wgmma_bf16.h"

namespace winnow::internal::attend::wide_sm90 {

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

// O += P V, 256 columns; P from registers or from its tile. Products of 16 rows form a group, so
// that these rows can be given back alone; kParts false: all form one group.
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

// Publishes P and the references for the other warpgroup. That one executes the fence between the
// proxies before its products read P: a fence here would wait for the producer's copies.
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

// Takes over the references of the other warpgroup's block, and rescales this warpgroup's sums if
// they differ. None of its products may be under way.
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
    // Nothing but zeros was added to O where there was no reference yet.
    const bool earlier = rows.reference[0] > -FLT_MAX || rows.reference[1] > -FLT_MAX;
    if (reference0 != rows.reference[0]) rows.set_reference(0, reference0);
    if (reference1 != rows.reference[1]) rows.set_reference(1, reference1);
    if (__any_sync(~0u, earlier)) rescale_output(o, by0, by1);
  }
}

// Gives a half back to the producer, 16 rows as soon as the product of multiply_values() that reads
// them is done. kLater: groups of products issued since.
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

// A warpgroup's part of an item's blocks, in the order at the head of this file. `phase`: of the
// barriers of this warpgroup's buffer, and of the other's.
//
// The tensor core takes products of both warpgroups in turn, so products that should be done first
// must be alone: b is scored after a, and a is weighed after b is scored (unless b's rows are
// late). Otherwise the softmax that the other warpgroup waits for begins late.
template <class Family, int kWarpgroup>
__device__ __forceinline__ void take_blocks(Smem<Family>& smem, const Args& args, int blocks,
                                            uint32_t (&phase)[2], float (&o)[128], TwoRows& rows) {
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
  auto make_weights = [&](auto on_move) {
    const bool rare = rows.far || args.scale < 0 || (valid.x & valid.y) != ~0u;
    bool far = false;
    if (__builtin_expect(__any_sync(~0u, rare || outgrown(peak, rows, unit)), 0)) {
      bool moved;
      if (__any_sync(~0u, rare || !near(peak, unit))) {
        moved = prepare_rare(s, peak, rows, unit, valid, args.scale < 0);
        far = rows.far;
      } else {
        moved = move_near(peak, unit, rows);
      }
      if (moved) on_move();
    }
    rows.row_max[0] = fmaxf(rows.row_max[0], peak[0]);
    rows.row_max[1] = fmaxf(rows.row_max[1], peak[1]);
    if (__builtin_expect(far, 0)) exponentials<true>(s, p, rows, unit);
    else exponentials<false>(s, p, rows, unit);
    if constexpr (Tiles::kTail) bar<kTailReadOf<kWarpgroup>, 128>();
    publish(smem, kWarpgroup, p, rows);
    phase[0] ^= 1;
  };
  const int own_blocks = (blocks + 1 - kWarpgroup) / 2;
  // With an odd number of blocks the last pair has no b.
  const int pairs = (blocks + 1) / 2;
  if (own_blocks == 0 && lane == 0) mb_arrive(&smem.q_empty);
#pragma unroll 1
  for (int i = 0; i < pairs; i++) {
    if constexpr (kWarpgroup == 0) {
      score(i > 0);
      if (i + 1 == own_blocks && lane == 0) mb_arrive(&smem.q_empty);
      make_weights([&] { rescale_output(o, rows.rescale[0], rows.rescale[1]); });
      const bool both = 2 * i + 1 < blocks;
      // An item's first b arrives while a is scored: then both of its halves count.
      if (both && mb_done(&smem.full[1][i == 0], phase[1])) mb_wait(&smem.scored[1], phase[1]);
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
        // This phase is over, since p_full[1] came after it. But if the wait above was left out,
        // nobody has waited for it yet, and no phase may go by without a wait.
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
      if (both) make_weights([&] { moved = true; });
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
}

// A warpgroup's part of every item. One copy of the code at an item's end serves both warpgroups.
template <bool kSwept, class Family>
__device__ __forceinline__ void consume(Smem<Family>& smem, const Args& args, int warpgroup) {
  // Phases of this warpgroup's buffer and of the other's.
  uint32_t phase[2] = {0, 0};
#pragma unroll 1
  for (int item = blockIdx.x, n = 0; item < args.items; item += gridDim.x, n++) {
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0;
    TwoRows rows;
    mb_wait(&smem.q_full, n & 1);
    const int blocks = smem.blocks;
    if (warpgroup == 0) take_blocks<Family, 0>(smem, args, blocks, phase, o, rows);
    else take_blocks<Family, 1>(smem, args, blocks, phase, o, rows);
    // Computed again: registers are short above.
    Work work = work_at(args, item);
    work.parity = n & 1;
    float sink[2];
    load_sinks(args, work, sink);
    epilogue<kSwept>(smem, args, work, warpgroup, o, rows, sink);
  }
}

}  // namespace winnow::internal::attend::wide_sm90
