// Decode on Hopper: S^T = K Q^T, and log2 P against a reference that may lag.
#pragma once

#include "attend/decode_sm90_exact.cuh"

namespace winnow::attention::sm90 {

template <class R, int N>
__device__ __forceinline__ void score(Smem<R, N>& sm, const Args& p, const Span& sp, float q_back) {
  using K = Config<R, N>;
  constexpr float kLog2e = 1.44269504088896f, kLag = 12.f, kTop = 4.f;
  const int t = thread_here() & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  float y[N / 2];  // S^T, then log2 P
  const float unit = p.scale * kLog2e * q_back;
  const uint32_t qa = s32(sm.q);
  const uint32_t lane_off = ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + (lane >> 4) * 16;
  // maxima of the columns over the 128 threads, of y + shift of the row
  auto column_max = [&](float c0, float c1) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      float a = fmaxf(y[4 * j] + c0, y[4 * j + 2] + c1),
            b = fmaxf(y[4 * j + 1] + c0, y[4 * j + 3] + c1);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        a = fmaxf(a, __shfl_xor_sync(~0u, a, d));
        b = fmaxf(b, __shfl_xor_sync(~0u, b, d));
      }
      if (r == 0) *reinterpret_cast<float2*>(&sm.wmax[w][8 * j + 2 * quad]) = make_float2(a, b);
    }
    bar<2, 128>();
    return t < N ? fmaxf(fmaxf(sm.wmax[0][t], sm.wmax[1][t]), fmaxf(sm.wmax[2][t], sm.wmax[3][t]))
                 : 0.f;
  };
  // rare: move the reference of every head to the maximum of the block in y. It stays finite: +inf
  // weighs 2^kTop against it, and nothing else does.
  bool first = true;  // some head has had no logit above -inf
  bool bare = t < N;  // head t has had none
  auto raise = [&](int b) {
    const float x = column_max(0.f, 0.f);
    if (t < N) {
      const float old = sm.m[t],
                  up = bare ? (x > -INFINITY ? x - kTop : 0.f) : fmaxf(0.f, x - kTop);
      const float m = fminf(old + up, FLT_MAX);
      sm.m[t] = m;
      sm.factor[t] = m - old;
      sm.alpha[b][t] = bare ? 0.f : ex2(old - m);
      bare = bare && !(x > -INFINITY);
    }
    if (t == 0) sm.flag[b] |= kMoved;
    first = bar_any<2, 128>(bare);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float2 up = *reinterpret_cast<const float2*>(&sm.factor[8 * j + 2 * quad]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& v = y[4 * j + e];
        v = v == INFINITY ? kTop : v - (e & 1 ? up.y : up.x);
      }
    }
  };
  int slot = w, ph = 0, buf = 0;  // buf: i mod 3
  // rows and scales of block i, once they have arrived
  auto prepare = [&](int i, bool& ok0, bool& ok1, int& lam0, int& lam1) {
    mb_wait(&sm.full[slot], ph);
    if (t == 0) sm.flag[buf] = 0;
    const uint32_t valid = sm.valid[slot];
    ok0 = (valid >> r) & 1;
    ok1 = (valid >> (r + 8)) & 1;
    lam0 = lam1 = 0;
    if constexpr (R::kFp8) {
      bool strange = false;
      // lane `quad` of a row's four writes scales quad, quad+4 as fp16, divided by 2^lambda:
      // [scale][token]
      uint16_t* sc = &sm.sc[buf][quad][w * 16 + r];
      if constexpr (R::kSideBytes == 0) {
        static_assert(R::kScales == 4);
        const float4 a =
            *reinterpret_cast<const float4*>(sm.ring[slot] + r * K::kPitch + R::kScaleOffset);
        const float4 b =
            *reinterpret_cast<const float4*>(sm.ring[slot] + (r + 8) * K::kPitch + R::kScaleOffset);
        const float ma = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
        const float mb = fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w)));
        lam0 = min(max((int)(__float_as_uint(ma) >> 23) - 127 - 6, -60), 60);
        lam1 = min(max((int)(__float_as_uint(mb) >> 23) - 127 - 6, -60), 60);
        const float ta = quad & 2 ? (quad & 1 ? a.w : a.z) : (quad & 1 ? a.y : a.x),
                    tb = quad & 2 ? (quad & 1 ? b.w : b.z) : (quad & 1 ? b.y : b.x);
        const float xa = ta * pow2i(-lam0), xb = tb * pow2i(-lam1);
        sc[0] = __half_as_ushort(__float2half_rn(xa));
        sc[8] = __half_as_ushort(__float2half_rn(xb));
        strange = strange_scale(ta, xa) || strange_scale(tb, xb);
      } else {
        static_assert(R::kSideBytes == 8 && R::kScales == 7);
        uint2 a = *reinterpret_cast<const uint2*>(sm.side[slot] + r * 8),
              b = *reinterpret_cast<const uint2*>(sm.side[slot] + (r + 8) * 8);
        if (!ok0) a = make_uint2(0, 0);
        if (!ok1) b = make_uint2(0, 0);
        auto lambda = [](uint2 v) {
          uint32_t mx = __vmaxu4(v.x, v.y & 0x00ffffff);
          mx = __vmaxu4(mx, mx >> 16);
          return min(max((int)max(mx & 0xff, (mx >> 8) & 0xff) - 127 - 7, -60), 60);
        };
        auto half_bits = [&](uint32_t v, int lam) -> uint16_t {
          const int byte = (v >> (8 * quad)) & 0xff;
          return byte == 255
                     ? (uint16_t)0x7e00
                     : __half_as_ushort(__float2half_rn(pow2i(max(byte - 127 - lam, -126))));
        };
        lam0 = lambda(a);
        lam1 = lambda(b);
        sc[0] = half_bits(a.x, lam0);
        sc[8] = half_bits(b.x, lam1);
        // the RoPE columns are bf16, and so is their factor
        sc[4 * 64] = quad < 3 ? half_bits(a.y, lam0) : (uint16_t)((127 - lam0) << 7);
        sc[4 * 64 + 8] = quad < 3 ? half_bits(b.y, lam1) : (uint16_t)((127 - lam1) << 7);
      }
      if constexpr (K::kExactly) {
        strange = __any_sync(~0u, strange);
        if (lane == 0) sm.odd[buf][w] = strange;
      }
      __syncwarp();
    }
  };
  bool next0 = false, next1 = false;
  int next_lam0 = 0, next_lam1 = 0;
  if (sp.blocks > 0) prepare(0, next0, next1, next_lam0, next_lam1);
#pragma unroll 1
  for (int i = 0; i < sp.blocks; i++) {
    const bool ok0 = next0, ok1 = next1;
    int lam0 = next_lam0, lam1 = next_lam1;
    const int rows = slot;
    const uint32_t base = s32(sm.ring[slot]) + lane_off;
    const uint16_t* sc = &sm.sc[buf][0][w * 16 + r];
    // S^T in groups of 32 columns: fragments of the next group are made while earlier ones multiply
    uint32_t a[kScoreSets][2][4], x[4];
    constexpr int kGroups8 = R::kFp8 ? R::kNope / 32 : 0, kGroups = R::kQk / 32;
    constexpr int kPer = R::kFp8 ? R::kTile / 32 : 1;
    uint32_t m0 = 0, m1 = 0, n0 = 0, n1 = 0;  // scales of this group and the next
    uint32_t rows_at = base, qd = desc(qa, 16);
    if constexpr (R::kFp8) {
      ldsm(x, rows_at);
      n0 = sc[0];
      n1 = sc[8];
    }
    auto group = [&](int g, int set, bool fp8) {
      uint32_t(&f)[2][4] = a[set % kScoreSets];
      if (fp8) {
        if (g % kPer == 0) {
          m0 = n0 * 0x10001u;
          m1 = n1 * 0x10001u;
        }
#pragma unroll
        for (int ks = 0; ks < 2; ks++) {
          uint32_t e0, e1, e2, e3;
          e4m3x4(x[ks * 2], e0, e2);
          e4m3x4(x[ks * 2 + 1], e1, e3);
          f[ks][0] = mul_h2(e0, m0);
          f[ks][1] = mul_h2(e1, m1);
          f[ks][2] = mul_h2(e2, m0);
          f[ks][3] = mul_h2(e3, m1);
        }
        if (g + 1 < kGroups8) {
          ldsm(x, rows_at + (g + 1) * 32);
          if ((g + 1) % kPer == 0) {
            n0 = sc[(g + 1) / kPer * 64];
            n1 = sc[(g + 1) / kPer * 64 + 8];
          }
        }
      } else {
        const uint32_t d0 = (uint32_t)(127 - lam0) * 0x800080u,
                       d1 = (uint32_t)(127 - lam1) * 0x800080u;  // 2^-lambda, bf16x2
#pragma unroll
        for (int ks = 0; ks < 2; ks++) {
          ldsm(f[ks], rows_at + g * 64 + ks * 32);
          if constexpr (R::kFp8) {
            f[ks][0] = mul_b2(f[ks][0], d0);
            f[ks][1] = mul_b2(f[ks][1], d1);
            f[ks][2] = mul_b2(f[ks][2], d0);
            f[ks][3] = mul_b2(f[ks][3], d1);
          }
        }
      }
      const uint32_t qg = fresh(qd + (((g / 2) * N * 128 + (g & 1) * 64) >> 4));
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 2; ks++) {
        const uint32_t d = qg + (ks * 32 >> 4);
        if (fp8) wgmma_rs<N, false, 0>(y, f[ks], d, set + ks > 0);
        else wgmma_rs<N, true, 0>(y, f[ks], d, set + ks > 0);
      }
      wg_commit();
      wg_wait<kScoreSets - 1>();
    };
    constexpr int kFirst = R::kFp8 ? kGroups8 : kGroups - 2;  // groups before the last two
#pragma unroll
    for (int g = 0; g < kFirst; g++) group(g, g, R::kFp8);
    // from here on the products of the block before may have the tensor core
    if (lane == 0) mb_arrive(&sm.go[i & 1]);
    rows_at = base + (R::kFp8 ? R::kRopeOffset : kFirst * 64);
    qd += kFirst / 2 * N * 128 >> 4;
#pragma unroll
    for (int g = 0; g < kGroups - kFirst; g++) group(g, kFirst + g, false);
    // the next block's rows, while the last products finish
    const int mine = buf;
    if (++buf == 3) buf = 0;
    slot += 4;
    if (slot >= K::kStages) {
      slot -= K::kStages;
      ph ^= 1;
    }
    // y has been read: so the products of block i - 2 are done, their scales and flag are free
    if (i >= 1) mb_wait(&sm.yempty, (i - 1) & 1);
    const bool more = i + 1 < sp.blocks, early = more && mb_done(&sm.full[slot], ph);
    if (early) prepare(i + 1, next0, next1, next_lam0, next_lam1);
    wg_wait<0>();
    hold(y);
    float mm[N / 4];
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float2 m = *reinterpret_cast<const float2*>(&sm.m[8 * j + 2 * quad]);
      mm[2 * j] = m.x;
      mm[2 * j + 1] = m.y;
    }
    // y = log2(e^s * 2^lambda) - m; an invalid row is -inf
    float k0 = unit * pow2i(lam0), k1 = unit * pow2i(lam1);
    if constexpr (K::kExactly)
      if (sm.odd[mine][w]) {
        exact_scores<R, N>(sm, p, rows);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
          const float4 v = sm.y[j][t];
          y[4 * j] = v.x, y[4 * j + 1] = v.y, y[4 * j + 2] = v.z, y[4 * j + 3] = v.w;
        }
        lam0 = lam1 = 0;
        k0 = k1 = p.scale * kLog2e;
      }
    const float b0 = ok0 ? (float)lam0 : -INFINITY, b1 = ok1 ? (float)lam1 : -INFINITY;
    float worst[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        y[4 * j + e] = fmaf(y[4 * j + e], e < 2 ? k0 : k1, (e < 2 ? b0 : b1) - mm[2 * j + (e & 1)]);
        worst[e] = max_nan(worst[e], y[4 * j + e]);
      }
    }
    if (p.max_logit) {  // on request only: the true maximum
      const float x = column_max((float)-lam0, (float)-lam1);
      if (t < N) sm.top[t] = fmaxf(sm.top[t], x + sm.m[t]);
      bar<2, 128>();
    }
    // a NaN asks for it too, and infinities that met
    if (bar_any<2, 128>(
            !(max_nan(max_nan(worst[0], worst[1]), max_nan(worst[2], worst[3])) <= kLag) || first))
      raise(mine);
    bool exact = false;
    if constexpr (K::kExactly) exact = *reinterpret_cast<const uint32_t*>(sm.odd[mine]) != 0;
    if (exact) {  // P is to be bf16, and itself
#pragma unroll
      for (int c = 0; c < N / 2; c++) y[c] -= (float)(c & 2 ? lam1 : lam0);
      lam0 = lam1 = 0;
      if (t == 0) sm.flag[mine] |= kExact;
    }
    // hand over
#pragma unroll
    for (int j = 0; j < N / 8; j++)
      sm.y[j][t] = make_float4(y[4 * j], y[4 * j + 1], y[4 * j + 2], y[4 * j + 3]);
    if (quad == 0) {
      sm.inverse[w * 16 + r] = ok0 ? pow2i(-lam0) : 0.f;
      sm.inverse[w * 16 + r + 8] = ok1 ? pow2i(-lam1) : 0.f;
    }
    mb_arrive(&sm.yfull);
    if (more && !early) prepare(i + 1, next0, next1, next_lam0, next_lam1);
  }
}

}  // namespace winnow::attention::sm90
