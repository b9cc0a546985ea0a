// Decode on Hopper: S^T = K Q^T of a block, handed on as log2 P.
#pragma once

#include "attend/decode_sm90_exact.cuh"

namespace winnow::attention::sm90 {

// A token's blocks from at.block on, a warp's first stage at at.slot; `at` goes on.
template <class R, int N>
__device__ __forceinline__ void score(Smem<R, N>& sm, const Args& p, const Span& sp, float q_back,
                                      Progress& at) {
  using K = Config<R, N>;
  const int t = thread_here() & 127, lane = t & 31, r = lane >> 2;
  const float unit = p.scale * kLog2e * q_back;  // turns S into log2 P
  float y[N / 2];
  const uint32_t qa = s32(sm.q);
  const uint32_t lane_off = ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + (lane >> 4) * 16;
  int slot = at.slot;
  const int behind = at.block + sp.blocks;
#pragma unroll 1
  for (int i = at.block; i < behind; i++) {
    mb_wait(&sm.ready[i % kReady], (i / kReady) & 1);
    const uint32_t base = s32(sm.ring[slot]) + lane_off;
    const uint16_t* sc = &sm.sc[slot][0][scale_at(r)];
    // S^T in groups of 64 columns: the next one's fragments are made while this one multiplies
    constexpr int kGroups8 = R::kFp8 ? R::kNope / 64 : 0, kGroups = R::kQk / 64;
    constexpr int kPer = R::kFp8 ? R::kTile / 64 : 1;  // groups of a scale
    uint32_t a[2][4][4], x[2][4];
    uint32_t n0 = 0, n1 = 0;  // scales of the next group
    uint32_t rows_at = base, qd = desc(qa, 16);
    auto load = [&](uint32_t at, int scale) {
      ldsm(x[0], at);
      ldsm(x[1], at + 32);
      if (scale >= 0) {
        n0 = twice(sc[scale * K::kRows]);
        n1 = twice(sc[scale * K::kRows + 2]);
      }
    };
    auto multiply = [&](auto kind, int g, int keep) {
      const uint32_t qg = fresh(qd + (g * N * 128 >> 4));
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 4; ks++)
        wgmma_rs<N, decltype(kind)::value, 0>(y, a[g & 1][ks], qg + (ks * 32 >> 4), keep || ks);
      wg_commit();
      wg_wait<1>();
    };
    if constexpr (R::kFp8) {
      // group g of the turn that begins at rows_at
      constexpr int kEarly = R::kTile == 64 ? 1 : 2;
      uint32_t z[2][4];  // the second half of RoPE's rows
      auto group = [&](int g, uint32_t next, int keep, bool last = false) {
        uint32_t(&f)[4][4] = a[g & 1];
        const uint32_t m0 = n0, m1 = n1;
#pragma unroll
        for (int ks = 0; ks < 4; ks++) {
          uint32_t e0, e1, e2, e3;
          e4m3x4(x[ks / 2][ks % 2 * 2], e0, e2);
          e4m3x4(x[ks / 2][ks % 2 * 2 + 1], e1, e3);
          f[ks][0] = mul_h2(e0, m0);
          f[ks][1] = mul_h2(e1, m1);
          f[ks][2] = mul_h2(e2, m0);
          f[ks][3] = mul_h2(e3, m1);
        }
        load(next, (g + 1) % kPer == 0 ? (g + 1) / kPer : -1);
        if (last)
#pragma unroll
          for (int k = 0; k < kEarly; k++) ldsm(z[k], next + 64 + 32 * k);
        multiply(std::false_type{}, g, keep);
      };
      load(base, 0);
      constexpr int kTurns = kGroups8 / 2, kSkip = R::kRopeOffset - R::kNope;
#pragma unroll
      for (int turn = 0; turn < kTurns; turn++) {
        group(0, rows_at + 64, turn);
        const bool end = kGroups8 % 2 == 0 && turn == kTurns - 1;
        group(1, rows_at + 128 + (end ? kSkip : 0), 1, end);
        rows_at += 128;
        sc += 2 / kPer * K::kRows;
        qd += 2 * N * 128 >> 4;
      }
      if constexpr (kGroups8 % 2) group(0, rows_at + 64 + kSkip, 1, true);
      // RoPE: the first half of its rows is in x
      constexpr int g = kGroups8 % 2;
      uint32_t(&f)[4][4] = a[g];
      rows_at += g * 64 + kSkip;
#pragma unroll
      for (int k = kEarly; k < 2; k++) ldsm(z[k], rows_at + 64 + 32 * k);
#pragma unroll
      for (int ks = 0; ks < 4; ks++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          f[ks][k] = mul_b2(ks < 2 ? x[ks][k] : z[ks - 2][k], k & 1 ? n1 : n0);
      multiply(std::true_type{}, g, 1);
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
#pragma unroll
        for (int ks = 0; ks < 4; ks++) ldsm(a[g & 1][ks], rows_at + g * 128 + ks * 32);
        multiply(std::true_type{}, g, g);
      }
    }
    const int rows = slot;
    slot += 4;
    if (slot >= K::kStages) slot -= K::kStages;
    // Weigh has loaded the last block, and moved the reference where that asked for it.
    if (i >= 1) mb_wait(&sm.yempty, (i - 1) & 1);
    float2 c0 = sm.row[rows][r], c1 = sm.row[rows][r + 8], m[N / 8];
#pragma unroll
    for (int j = 0; j < N / 8; j++)
      m[j] = *reinterpret_cast<const float2*>(&sm.m[8 * j + 2 * (lane & 3)]);
    bool odd = false;
    if constexpr (K::kExactly) odd = sm.odd[rows] & kOddRows;
    wg_wait<0>();
    hold(y);
    if constexpr (K::kExactly) {
      if (odd) {  // their unit is not Q's, and lambda is 0
        exact_scores<R, N>(sm, p, sp.token, rows);
        c0 = make_float2(1 / q_back, c0.y > -INFINITY ? 0.f : -INFINITY);
        c1 = make_float2(1 / q_back, c1.y > -INFINITY ? 0.f : -INFINITY);
        __syncwarp();
        if ((lane & 3) == 0) sm.row[rows][r] = c0, sm.row[rows][r + 8] = c1;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
          const float4 v = sm.y[j][t];
          y[4 * j] = v.x, y[4 * j + 1] = v.y, y[4 * j + 2] = v.z, y[4 * j + 3] = v.w;
        }
      }
    }
    // log2(e^s * 2^lambda) - m; an invalid row is -inf. The logit is rounded before m, which is one
    // of them, is taken off: equal ones stay equal however large they are.
    const float k0 = unit * c0.x, k1 = unit * c1.x;
    float worst[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& v = y[4 * j + e];
        v = fmaf(v, e < 2 ? k0 : k1, e < 2 ? c0.y : c1.y) - (e & 1 ? m[j].y : m[j].x);
        worst[e] = max_nan(worst[e], v);
      }
      sm.y[j][t] = make_float4(y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]);
    }
    // Too far above the reference: weigh moves it. A NaN asks for it too, and infinities that met.
    if (!(max_nan(max_nan(worst[0], worst[1]), max_nan(worst[2], worst[3])) <= kLag))
      sm.moved[i & 1] = 1;
    mb_arrive(&sm.yfull);
  }
  at = {slot, behind};
}

}  // namespace winnow::attention::sm90
