// Decode on Hopper: P of half of the heads, O^T += V^T P^T for half of the columns.
#pragma once

#include "attend/decode_sm90/exact.cuh"
#include "attend/decode_sm90/exchange.cuh"
#include "attend/decode_sm90/out.cuh"

namespace winnow::internal::attend::decode_sm90 {

// How far a weigh warpgroup is, and its sums.
template <int N>
struct Weighed : Progress {
  float o[4][N / 2];
};

// P of half of the heads, O^T += V^T P^T for 256 of the 512 columns, the half that warpgroup g has.
// One code for both: two of them did not fit the instruction cache (V4 waited 15 % of its time). So
// the last tile of either is bf16 with V4's fp8 rows, whose last one is RoPE: e4m3 times a power of
// two is exact there too.
// A token's blocks from at.block on; `at` goes on.
template <class R, int N, Way W>
__device__ __forceinline__ void weigh(Smem<R, N>& sm, const Args& p, const Span& sp, int g,
                                      Weighed<N>& at) {
  using K = Config<R, N>;
  using Out = Leaving<R, N, W>;
  constexpr float kTop = 4.f;
  const int t = thread_here() & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  float(&o)[4][N / 2] = at.o;
  // eights of heads whose P this warpgroup makes: kJ from j0 on, one less where they are odd
  constexpr int kJ = (N / 8 + 1) / 2;
  const int j0 = g * kJ, end = N / 8 - j0;
  const auto mine = [&](int j) { return N % 16 == 0 || j + 1 < kJ || j < end; };
  float l[2 * kJ];
#pragma unroll
  for (int c = 0; c < 2 * kJ; c++) l[c] = 0;
  const auto wide = [&](int m) { return K::kRopeInV && m == 3; };  // the tile that is bf16
  // lanes 0-7, 8-15, 16-23, 24-31 give the rows of the four 8x8 tiles
  const uint32_t off8 =
      ((lane & 7) + 8 * ((lane >> 3) & 1)) * K::kPitch + g * 256 + sixteen<R, N>(w, lane >> 4) * 16;
  const uint32_t off16 = ((lane & 7) + 8 * (lane >> 4)) * K::kPitch + ((lane >> 3) & 1) * 16 +
                         w * (R::kFp8 ? 32 : 128) + g * 512;
  auto both = [] { bar<4, 256>(); };
  // A thread keeps the reference of a head: which it is, again rather than in a register.
  struct Keeper {
    int head;
    bool some;
  };
  const auto keeper = [&]() -> Keeper {
    const int own = thread_here() & 127, head = 8 * j0 + own;
    return {head, own < 8 * kJ && head < N};
  };
  const auto drain = [&] {
    wg_wait<0>();
#pragma unroll
    for (int m = 0; m < 4; m++) hold(o[m]);
  };
  const auto sum_up = [&] {  // sums of each head over the 128 threads
    const int here = thread_here(), lane = here & 31, w = here / 32 & 3, quad = lane & 3;
    float* const to = &sm.warp[w][8 * (here / 128 * kJ) + 2 * quad];
#pragma unroll
    for (int c = 0; c < 2 * kJ; c++)
#pragma unroll
      for (int d = 4; d < 32; d *= 2) l[c] += __shfl_xor_sync(~0u, l[c], d);
    if (lane < 4)
#pragma unroll
      for (int j = 0; j < kJ; j++)
        if (mine(j)) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(l[2 * j], l[2 * j + 1]);
    both();
  };
  const auto sum_of = [&](int h) {
    return (sm.warp[0][h] + sm.warp[1][h]) + (sm.warp[2][h] + sm.warp[3][h]);
  };
  // Here and behind the loop p.exchange is set, and tested all the same: else ptxas has products
  // wait for each other (C7515).
  if (W == Way::kExchange && p.exchange) {
    if (const auto [head, some] = keeper(); some) mark_statistics<N>(p, sp, head);
    __syncwarp();
    if (lane == 0) mb_arrive(&sm.marked);
  }
  int slot = at.slot;
  const int behind = at.block + sp.blocks;
  if (Out::kSo && at.block > 0 && sp.blocks > 0) {
    mb_wait(&sm.yfull, at.block & 1);  // till then there is nothing to do
    give_back(sm, slot);
  }
#pragma unroll 1
  for (int i = at.block; i < behind; i++) {
    mb_wait(&sm.yfull, i & 1);
    float y[4 * kJ];
#pragma unroll
    for (int j = 0; j < kJ; j++) {
      const float4 v = sm.y[mine(j) ? j0 + j : 0][t];
      y[4 * j] = v.x, y[4 * j + 1] = v.y, y[4 * j + 2] = v.z, y[4 * j + 3] = v.w;
    }
    const int at = slot + w < K::kStages ? slot + w : slot + w - K::kStages;
    const float2 c0 = sm.row[at][r], c1 = sm.row[at][r + 8];
    const bool moved = sm.moved[i & 1];
    bool exact = false;  // P is to be bf16, and itself
    if constexpr (K::kExactly) exact = sm.odd[slot] & kOddBlock;
    drain();  // the last block's products, behind the loads: 150 cycles less to wait for
    if (i >= 1 && lane == 0) mb_arrive(&sm.pempty);
    const auto heads = [&](const float* of, int j) {  // two floats of eight j
      return *reinterpret_cast<const float2*>(&of[8 * (mine(j) ? j0 + j : 0) + 2 * quad]);
    };
    // maxima of this warpgroup's heads over the block, of y + shift of the row
    auto column_max = [&](float d0, float d1) {
#pragma unroll
      for (int j = 0; j < kJ; j++) {
        float a = fmaxf(y[4 * j] + d0, y[4 * j + 2] + d1),
              b = fmaxf(y[4 * j + 1] + d0, y[4 * j + 3] + d1);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          a = fmaxf(a, __shfl_xor_sync(~0u, a, d));
          b = fmaxf(b, __shfl_xor_sync(~0u, b, d));
        }
        if (r == 0 && mine(j))
          *reinterpret_cast<float2*>(&sm.warp[w][8 * (j0 + j) + 2 * quad]) = make_float2(a, b);
      }
      both();
      const Keeper k = keeper();
      const int h = k.some ? k.head : 0;
      return fmaxf(fmaxf(sm.warp[0][h], sm.warp[1][h]), fmaxf(sm.warp[2][h], sm.warp[3][h]));
    };
    if (p.max_logit) {  // on request only: the true maximum; NaN where there is no token
      const float x = column_max(-c0.y, -c1.y);
      const auto [head, some] = keeper();
      if (some) sm.top[head] = fmaxf(sm.top[head], x + sm.m[head]);
      both();  // it is read before the next maxima
    }
    if (moved) {
      // rare: move the reference of every head to the maximum of the block in y. It stays finite:
      // +inf weighs 2^kTop against it, and nothing else does.
      const float x = column_max(0.f, 0.f);
      const auto [head, some] = keeper();
      if (some) {
        const bool bare = sm.sum[head] == 0;  // no logit above -inf has been seen
        const float old = sm.m[head],
                    up = bare ? (x > -INFINITY ? x - kTop : 0.f) : fmaxf(0.f, x - kTop);
        const float m = fminf(old + up, FLT_MAX);
        sm.m[head] = m;
        sm.factor[head] = m - old;
        sm.alpha[head] = bare ? 0.f : ex2(old - m);
        if (x > -INFINITY) sm.sum[head] = 1;
        else if (bare) sm.moved[~i & 1] = 1;
      }
      if (g == 0 && t == 0) sm.moved[i & 1] = 0;
      both();
#pragma unroll
      for (int j = 0; j < kJ; j++) {
        const float2 up = heads(sm.factor, j), al = heads(sm.alpha, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float& v = y[4 * j + e];
          v = v == INFINITY ? kTop : v - (e & 1 ? up.y : up.x);
        }
        l[2 * j] *= al.x;
        l[2 * j + 1] *= al.y;
      }
      if (i > 0)
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
          const float2 al = *reinterpret_cast<const float2*>(&sm.alpha[8 * j + 2 * quad]);
#pragma unroll
          for (int m = 0; m < 4; m++) {
            o[m][4 * j] *= al.x;
            o[m][4 * j + 1] *= al.y;
            o[m][4 * j + 2] *= al.x;
            o[m][4 * j + 3] *= al.y;
          }
        }
    }
    // The reference that score reads next is the new one. The last block's places are given back
    // when the output has left through them.
    const bool last = Out::kSo && i + 1 == behind;
    if (!(Out::kOverY && last)) mb_arrive(&sm.yempty[i & 1]);
    // 2^-lambda, 0 for a row without a token
    float i0 = c0.y > -INFINITY ? __uint_as_float((254u << 23) - __float_as_uint(c0.x)) : 0.f,
          i1 = c1.y > -INFINITY ? __uint_as_float((254u << 23) - __float_as_uint(c1.x)) : 0.f;
    if (exact) {
#pragma unroll
      for (int c = 0; c < 4 * kJ; c++) y[c] -= c & 2 ? (i1 > 0 ? c1.y : 0) : (i0 > 0 ? c0.y : 0);
      i0 = c0.y > -INFINITY, i1 = c1.y > -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kJ; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) y[4 * j + e] = ex2(y[4 * j + e]);
      l[2 * j] = fmaf(y[4 * j], i0, fmaf(y[4 * j + 2], i1, l[2 * j]));
      l[2 * j + 1] = fmaf(y[4 * j + 1], i0, fmaf(y[4 * j + 3], i1, l[2 * j + 1]));
    }
    const int here = thread_here(), prow = (here >> 1 & 48) + (here & 15);  // of P^T's tiles
    auto put = [&](auto kind, int k, uint32_t at) {  // eights k and k - 1, or k alone, of P^T
      constexpr bool bf = decltype(kind)::value;
      const bool both = k & 1 && mine(k);
      const uint32_t dst =
          at + prow * 128 + (((j0 + (k & 1 ? k - 1 + (lane >> 4) : k)) ^ (prow & 7)) << 4);
      const uint32_t x0 = pack<bf>(y[4 * k], y[4 * k + 1]),
                     x1 = pack<bf>(y[4 * k + 2], y[4 * k + 3]);
      if (k & 1) {
        const uint32_t z0 = pack<bf>(y[4 * k - 4], y[4 * k - 3]),
                       z1 = pack<bf>(y[4 * k - 2], y[4 * k - 1]);
        if (both) stsm4(dst, z0, z1, x0, x1);
        else stsm2(dst, z0, z1);
      } else if (mine(k)) {
        stsm2(dst, x0, x1);
      }
    };
    // both warpgroups are done with the last block's P
    if (i >= 1) mb_wait(&sm.pempty, (i - 1) & 1);
#pragma unroll
    for (int j = 0; j < kJ; j++)
      if ((j & 1) || j == kJ - 1) {
        if (K::kRopeInV || !exact) put(std::bool_constant<!R::kFp8>{}, j, s32(sm.p[0]));
        if (K::kRopeInV || exact) put(std::true_type{}, j, s32(sm.p[K::kPKinds - 1]));
      }
    // half steps: 16 tokens x two 64-row tiles; the next one's rows are read while this one
    // multiplies
    constexpr int kS = R::kFp8 && R::kTile == 64 ? 2 : 1;  // scales of a half step
    uint32_t raw[4], scale[kS][2], a[2][2][4];
    auto load = [&](int hf) {  // both fp8 tiles of a half step
      if constexpr (R::kFp8) {
        ldsm_t(raw, s32(sm.ring[slot]) + off8 + sixteen<R, N>(0, 2 * hf) * 16);
        if (kS == 1 && hf == 1) return;  // a warp's columns have one scale
#pragma unroll
        for (int k = 0; k < kS; k++) {
          // chosen by arithmetic: a branch between products would have ptxas wait for each of them
          const int tile = kS == 2 ? 4 * g + 2 * hf + k : 2 * g + w / 2,
                    other = wide(2 * hf + k) && g == 0
                                ? static_cast<int>(sm.side[slot] - reinterpret_cast<const uint8_t*>(
                                                                       sm.sc[slot][K::kSc - 1]))
                                : 32 * (tile - (K::kSc - 1));
          const uint8_t* at = reinterpret_cast<const uint8_t*>(&sm.sc[slot][K::kSc - 1][4 * quad]);
          const uint2 x = *reinterpret_cast<const uint2*>(at + other);
          scale[k][0] = x.x, scale[k][1] = x.y;
        }
      }
    };
    auto make = [&](int hf) {
#pragma unroll
      for (int k2 = 0; k2 < 2; k2++) {
        const int m = 2 * hf + k2;
        uint32_t(&f)[4] = a[hf][k2];
        const uint32_t lo = scale[k2 % kS][0], hi = scale[k2 % kS][1];
        if (!R::kFp8) {
          ldsm_t(f, s32(sm.ring[slot]) + off16 + m * 32);
        } else if (wide(m)) {
#pragma unroll
          for (int e = 0; e < 4; e++) f[e] = e4m3_b2(raw[2 + e / 2], e & 1);
          ldsm_t_if(g, f, s32(sm.ring[slot]) + off16 - 512 + R::kRopeOffset);
          f[0] = mul_b2(f[0], lo);
          f[1] = mul_b2(f[1], lo);
          f[2] = mul_b2(f[2], hi);
          f[3] = mul_b2(f[3], hi);
        } else {
          uint32_t e0, e1, e2, e3;
          e4m3x4(__byte_perm(raw[k2 * 2], 0, 0x3120), e0, e1);
          e4m3x4(__byte_perm(raw[k2 * 2 + 1], 0, 0x3120), e2, e3);
          f[0] = mul_h2(e0, lo);
          f[1] = mul_h2(e1, lo);
          f[2] = mul_h2(e2, hi);
          f[3] = mul_h2(e3, hi);
        }
      }
    };
    auto begin = [&] {
      load(0);
      make(0);
      load(1);
    };
    begin();
    fence_async();
    both();
    if (W == Way::kExchange && i + 1 == behind) {
      // the last block: statistics go out while it is multiplied
      sum_up();
      if (const auto [head, some] = keeper(); some)
        send_statistics<R, N>(sm, p, job<N>(p), head, sum_of(head));
    }
    uint32_t pd = desc(s32(sm.p[0]), 8192);
    if constexpr (K::kExactly)
      if (exact) {
        exact_products<R, N>(sm, slot, g, pd, o);
        slot += 4;
        if (slot >= K::kStages) slot -= K::kStages;
        continue;
      }
    auto multiply = [&](int hf) {
      const uint32_t pk = fresh(pd);
      wg_fence();
#pragma unroll
      for (int k2 = 0; k2 < 2; k2++) {
        const int m = 2 * hf + k2;
        if (!wide(m)) wgmma_rs<N, !R::kFp8, 1>(o[m], a[hf][k2], pk, 1);
        else wgmma_rs<N, true, 1>(o[m], a[hf][k2], pk + (8192 >> 4), 1);
      }
      wg_commit();
    };
#pragma unroll
    for (int ks = 0; ks < 4; ks++, pd += 2048 >> 4) {
      multiply(0);
      wg_wait<1>();
      make(1);
      __syncwarp();
      if (lane == 0 && !last) mb_arrive(&sm.empty[slot]);  // rows are in registers, the stage free
      if (++slot == K::kStages) slot = 0;
      if (ks < 3) load(0);
      multiply(1);
      if (ks < 3) {
        wg_wait<1>();
        make(0);
        load(1);
      }
    }
  }
  drain();
  if (W == Way::kExchange && p.exchange) {
    const Span here = job<N>(p);  // again, rather than in registers of the loop over blocks
    mb_wait(&sm.marked, 0);
    send_exchanged<N>(p, here, o);
    if (const auto [head, some] = keeper(); some && behind == at.block)
      send_statistics<R, N>(sm, p, here, head, 0.f);
    return collect<R, N>(sm, p, here);
  }
  if constexpr (W == Way::kExchange) return;
  sum_up();
  at.slot = slot;
  at.block = behind;
  const auto [head, some] = keeper();
  if constexpr (W == Way::kMany) {
    float m = 0, sum = 0, top = 0;
    const auto finished = [&](bool write) {
      return finish(p, sp.token, job<N>(p).head0 + head, m, sum, top, write);
    };
    if (some) {
      m = sm.m[head], top = sm.top[head];
      sum = sum_of(head);
      sm.factor[head] = finished(false);
      if (sp.blocks > 0) {  // as the next token is to find them, before its first scores
        sm.m[head] = sm.sum[head] = 0.f;
        sm.top[head] = -INFINITY;
        if (head == 0) sm.moved[behind & 1] = 1;
        mb_arrive(&sm.inbox);
      }
    }
    both();
    if constexpr (Out::kSo) {
      if (sp.blocks > 0) {
        if constexpr (Out::kOverY) {
          put_out<Out::kEights, N / 8>(Out(sm, slot), sm, o, g);
          both();
          send_out<Out::kEights, N / 8>(Out(sm, slot), p, sp.token);
        }
        put_out<0, Out::kEights>(Out(sm, slot), sm, o, g);
        if constexpr (Out::kOverY) {
          wait_for_reads();
          mb_arrive(&sm.yempty[(behind - 1) & 1]);
        }
        both();
        send_out<0, Out::kEights>(Out(sm, slot), p, sp.token);
      } else {
        put_zeros<N>(p, sp.token);
      }
      if (some) finished(true);
      if (p.tokens - sp.token <= static_cast<int>(gridDim.y)) wait_for_reads();  // the last token
    } else {
      if (some) finished(true);
      write_out<R, N, true>(sm, p, sp.token, o, g);
    }
    return;
  }
  if (some) {
    sm.sum[head] = sum_of(head);
    if constexpr (W == Way::kAlone)
      sm.factor[head] =
          finish(p, sp.token, sp.head0 + head, sm.m[head], sm.sum[head], sm.top[head], true);
  }
  if constexpr (W == Way::kAlone) {
    both();
    write_out<R, N, false>(sm, p, sp.token, o, g);
  } else {
    // The sums go as bf16 to the CTAs that add them up, over their dead Q, P and rows. That is off
    // by 2^-9 sum p|v| at most, as much as the output's own rounding adds, and halves what the
    // merge waits for: distributed shared memory takes 14 bytes a cycle.
    meet<3, K::kMath>();
    const int rank = split_here(p), splits = p.splits;
    if (g == 0 && t == 0) {
      mb_expect(&sm.inbox, received_units<N>(p, rank));
      mb_expect(&sm.notes, splits * (N * 16));
    }
    cluster_meet();
    send_statistics<R, N>(sm, rank, splits);
    const int first = g * (N / 2) + w / 2;
    int place = static_cast<int>(over_splits(p, first)), to = first - place * splits;
    auto& in = *reinterpret_cast<Received<R, N>*>(sm.q);
#pragma unroll
    for (int m = 0; m < 4; m += 2)
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const uint4 x = unit_of<N>(o, m, j);
        uint4* at = &in.units[place * splits + rank][t & 63];
        if (to == rank) *at = x;
        else peer_put(peer(s32(at), to), x, peer(s32(&sm.inbox), to));
        to += 2;
        if (to >= splits) to -= splits, place++;
      }
  }
}

}  // namespace winnow::internal::attend::decode_sm90
