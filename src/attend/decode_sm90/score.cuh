// Decode on Hopper: S^T = K Q^T of a block, handed on as log2 P.
#pragma once

#include "attend/decode_sm90/exact.cuh"

namespace winnow::internal::attend::decode_sm90 {

// Whether scales are taken times sums over a scale's columns, not times the rows: with few heads
// fewer instructions, and exact whatever V3.2's scales are.
template <class R, int N>
constexpr bool kScaledSums = N <= 16 && R::kFp8;

// S^T of a warp's 16 rows in the stage at `slot`, times `unit`, by columns that share a scale: one
// of two sums grows while the other one, of the columns before, is scaled and added to y.
template <class R, int N>
__device__ __forceinline__ void scaled_sums(const Smem<R, N>& sm, int slot, float unit,
                                            float (&y)[N / 2]) {
  using K = Config<R, N>;
  const int lane = thread_here() & 31, r = lane >> 2;
  constexpr int kGroups = R::kNope / 64, kPer = R::kTile / 64;  // of 64 columns; of a scale
  uint32_t rows =
      s32(sm.ring[slot]) + ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + (lane >> 4) * 16;
  const uint32_t q0 = __shfl_sync(~0u, desc(s32(sm.q), 16), 0);  // uniform
  uint32_t a[2][4][4], x[4][4];  // fragments; codes of the next group, or RoPE
  float sum[2][N / 2];
  // The scales of rows r and r + 8 times unit: V3.2's as they are stored, V4's by their halves.
  float4 stored[2];
  float2 halves{};
  const uint16_t* sc = &sm.sc[slot][0][scale_at(r)];
  if constexpr (R::kSideBytes == 0) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float4 v = *reinterpret_cast<const float4*>(sm.ring[slot] + (r + 8 * k) * K::kPitch +
                                                        R::kScaleOffset);
      stored[k] = make_float4(v.x * unit, v.y * unit, v.z * unit, v.w * unit);
    }
  } else {
    halves = make_float2(sm.row[slot][r].x * unit, sm.row[slot][r + 8].x * unit);
  }
  const auto scales = [&](int tile) {
    if constexpr (R::kSideBytes == 0) {
      const auto of = [&](const float4& v) {
        return tile == 0 ? v.x : tile == 1 ? v.y : tile == 2 ? v.z : v.w;
      };
      return make_float2(of(stored[0]), of(stored[1]));
    } else {
      const __half* at = reinterpret_cast<const __half*>(sc + tile * K::kRows);
      return make_float2(__half2float(at[0]) * halves.x, __half2float(at[2]) * halves.y);
    }
  };
  const auto add = [&](int tile, float2 f) {
    float(&from)[N / 2] = sum[tile & 1];
    hold(from);
#pragma unroll
    for (int c = 0; c < N / 2; c++)
      y[c] = tile == 0 ? from[c] * (c & 2 ? f.y : f.x) : fmaf(from[c], c & 2 ? f.y : f.x, y[c]);
  };
  const auto multiply = [&](auto kind, uint32_t(&f)[4][4], int g, float(&to)[N / 2], int keep) {
    const uint32_t q = fresh(q0 + (g * N * 128 >> 4));
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
      wgmma_rs<N, decltype(kind)::value, 0>(to, f[ks], q + (ks * 32 >> 4), keep || ks);
    wg_commit();
  };
  ldsm(x[0], rows);
  ldsm(x[1], rows + 32);
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    const int tile = g / kPer;
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
      uint32_t(&f)[4] = a[g & 1][ks];
      e4m3x4(x[ks / 2][ks % 2 * 2], f[0], f[2]);
      e4m3x4(x[ks / 2][ks % 2 * 2 + 1], f[1], f[3]);
    }
    const bool last = g + 1 == kGroups;
    rows += last ? 64 + R::kRopeOffset - R::kNope : 64;
    ldsm(x[0], rows);
    ldsm(x[1], rows + 32);
    float2 f{};
    if (g % kPer == 0 && g > 0) f = scales(tile - 1);
    multiply(std::false_type{}, a[g & 1], g, sum[tile & 1], g % kPer);
    wg_wait<1>();
    if (g % kPer == 0 && g > 0) add(tile - 1, f);
  }
  ldsm(x[2], rows + 64);
  ldsm(x[3], rows + 96);
  const float2 f = scales(R::kScales - 1);
  multiply(std::true_type{}, x, kGroups, sum[R::kScales & 1], 0);
  wg_wait<1>();
  add(R::kScales - 1, f);
  wg_wait<0>();
  add(R::kScales, make_float2(unit, unit));
}

// A token's blocks from at.block on, a warp's first stage at at.slot; `at` goes on. Of two score
// warpgroups each has every other block of a CTA.
template <class R, int N>
__device__ __forceinline__ void score(Smem<R, N>& sm, const Args& p, const Span& sp, float q_back,
                                      Progress& at) {
  using K = Config<R, N>;
  const int t = thread_here() & 127, lane = t & 31, r = lane >> 2;
  const float unit = p.scale * kLog2e * q_back;  // turns S into log2 P
  float y[N / 2];
  const uint32_t qa = K::kScorers == 1 ? s32(sm.q) : __shfl_sync(~0u, s32(sm.q), 0);  // uniform
  const uint32_t lane_off = ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + (lane >> 4) * 16;
  const int behind = at.block + sp.blocks, end = (at.slot + 4 * sp.blocks) % K::kStages;
  const auto go_on = [](int slot, int stages) {
    return slot + stages < K::kStages ? slot + stages : slot + stages - K::kStages;
  };
  int slot = at.slot, i = at.block;
  if (K::kScorers == 2 && ((thread_here() / 128 ^ i) & 1)) slot = go_on(slot, 4), i++;
#pragma unroll 1
  for (; i < behind; i += K::kScorers) {
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
    if constexpr (kScaledSums<R, N>) {
      scaled_sums<R, N>(sm, slot, unit, y);
    } else if constexpr (R::kFp8) {
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
    slot = go_on(slot, 4 * K::kScorers);
    // Weigh has loaded the last block, and moved the reference where that asked for it.
    if (i >= 1) mb_wait(&sm.yempty[(i - 1) & 1], ((i - 1) >> 1) & 1);
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
        if constexpr (!kScaledSums<R, N>) exact_scores<R, N>(sm, p, sp.token, rows);
        c0 = make_float2(1 / q_back, c0.y > -INFINITY ? 0.f : -INFINITY);
        c1 = make_float2(1 / q_back, c1.y > -INFINITY ? 0.f : -INFINITY);
        __syncwarp();
        if ((lane & 3) == 0) sm.row[rows][r] = c0, sm.row[rows][r + 8] = c1;
        if constexpr (!kScaledSums<R, N>)
#pragma unroll
          for (int j = 0; j < N / 8; j++) {
            const float4 v = sm.y[j][t];
            y[4 * j] = v.x, y[4 * j + 1] = v.y, y[4 * j + 2] = v.z, y[4 * j + 3] = v.w;
          }
      }
    }
    // log2(e^s * 2^lambda) - m; an invalid row is -inf. The logit is rounded before m, which is one
    // of them, is taken off: equal ones stay equal however large they are.
    const float k0 = kScaledSums<R, N> ? 1 : unit * c0.x, k1 = kScaledSums<R, N> ? 1 : unit * c1.x;
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
  at = {end, behind};
}

}  // namespace winnow::internal::attend::decode_sm90
