// Decode on Hopper: the producer's copies and the loading of Q.
#pragma once

#include "attend/decode_sm90_layout.cuh"

namespace winnow::attention::sm90 {

// A warp copies every fourth stage of 16 rows, a lane a row.
template <class R, int N>
__device__ __forceinline__ void produce(Smem<R, N>& sm, const Args& p, const Span& sp, int token) {
  using K = Config<R, N>;
  const int w = (threadIdx.x / 32) & 3, lane = threadIdx.x & 31, row = lane & 15;
  const int end = min(sp.total, sp.begin + sp.blocks * K::kBlock), count = sp.blocks * 4;
  auto locate = [&](int list, int v, const std::byte*& side) -> const std::byte* {
    const ListView& L = p.lists[list];
    const Entry e = resolve(L, v, L.block_table ? __ldg(p.requests + token * p.request_stride) : 0);
    if (e.page < 0) return nullptr;
    const std::byte* base = L.data + e.page * L.page_stride;
    if constexpr (R::kSideBytes > 0) side = base + R::Stored::scales(e.offset, L.page);
    return base + R::Stored::row(e.offset, L.page);
  };
  auto fetch = [&](int n, int& list) {
    const int pos = sp.begin + n * K::kRows + row;
    list = pos >= sp.n0;
    if (lane >= 16 || pos >= end) return -1;
    const ListView& L = p.lists[list];
    return __ldg(L.indices + (int64_t)token * L.index_stride + (pos - (list ? sp.n0 : 0)));
  };
  int list;
  int v = fetch(w, list);
  const std::byte *side = nullptr, *src = locate(list, v, side);
  int slot = w % K::kStages, ph = 1;
#pragma unroll 1
  for (int n = w; n < count; n += 4) {
    v = fetch(n + 4, list);
    mb_wait(&sm.empty[slot], ph);
    const uint32_t bar = s32(&sm.full[slot]), dst = s32(sm.ring[slot]) + row * K::kPitch;
    const uint32_t mask = __ballot_sync(~0u, src != nullptr);
    if (src)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::
              "r"(dst),
          "l"(src), "n"(R::kRowBytes), "r"(bar)
          : "memory");
    if constexpr (R::kSideBytes > 0) {
      if (src)
        asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(s32(sm.side[slot]) +
                                                                     row * R::kSideBytes),
                     "l"(side), "n"(R::kSideBytes)
                     : "memory");
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
    }
    // rows without a valid token become zeros, so that nothing stale is multiplied
    for (uint32_t bad = ~mask & 0xffff; bad; bad &= bad - 1) {
      const int r = __ffs(bad) - 1;
      for (int c = lane; c < R::kRowBytes / 16; c += 32)
        *reinterpret_cast<uint4*>(sm.ring[slot] + r * K::kPitch + c * 16) = make_uint4(0, 0, 0, 0);
    }
    if (mask != 0xffff) fence_async();
    __syncwarp();
    if (lane == 0) {
      sm.valid[slot] = mask;
      mb_expect(&sm.full[slot], __popc(mask) * R::kRowBytes);
    }
    src = locate(list, v, side);
    slot += 4;
    if (slot >= K::kStages) {
      slot -= K::kStages;
      ph ^= 1;
    }
  }
}

// Q in shared memory, columns permuted to match the rows' fragments.
// The weigh warps take the NoPE part (a warp: heads w, w+8, ...), the score warps the RoPE part (a
// warp: four heads a load).
template <class R, int N, bool kRopePart>
__device__ __forceinline__ float load_q(Smem<R, N>& sm, const Args& p, int token, int head0) {
  using K = Config<R, N>;
  const int lane = threadIdx.x & 31, w = (threadIdx.x / 32) & 7;
  constexpr int kLoads = kRopePart ? (N + 15) / 16 : N / 4;
  const int h0 = kRopePart ? (w & 3) * 4 + lane / 8 : w;
  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int h = kRopePart ? h0 + 16 * i : h0 + 8 * (i / 2),
              c = kRopePart ? lane & 7 : lane + 32 * (i & 1);
    v[i] = make_uint4(0, 0, 0, 0);
    if (head0 + h < p.heads && h < N && (kRopePart || c < R::kNope / 8)) {
      const bf16* s =
          kRopePart ? p.q_rope + (int64_t)token * p.qr_token + (int64_t)(head0 + h) * p.qr_head
                    : p.q + (int64_t)token * p.q_token + (int64_t)(head0 + h) * p.q_head;
      v[i] = __ldg(reinterpret_cast<const uint4*>(s) + c);
    }
  }
  float f = 1, back = 1;
  if constexpr (R::kFp8) {
    // one power of two for all heads brings Q into fp16's range
    uint32_t mx = 0;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      mx = __vmaxu2(mx, __vmaxu2(v[i].x & 0x7fff7fff, v[i].y & 0x7fff7fff));
      mx = __vmaxu2(mx, __vmaxu2(v[i].z & 0x7fff7fff, v[i].w & 0x7fff7fff));
    }
    mx = __reduce_max_sync(~0u, max(mx & 0xffff, mx >> 16));
    if (lane == 0) atomicMax(&sm.qmax, mx);
    bar<1, K::kMath>();
    const int e = min(max((int)(sm.qmax >> 7) - 127, -60), 100);
    f = pow2i(13 - e);
    back = pow2i(e - 13);
  }
#pragma unroll
  for (int i = 0; i < kLoads; i++) {
    const int h = kRopePart ? h0 + 16 * i : h0 + 8 * (i / 2),
              c = kRopePart ? lane & 7 : lane + 32 * (i & 1);
    if (h >= N || !(kRopePart || c < R::kNope / 8)) continue;
    uint8_t* row = sm.q + (kRopePart ? K::kNopeTiles : c >> 3) * (N * 128) + h * 128;
    uint32_t x[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    if constexpr (R::kFp8) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        x[k] = pack<kRopePart>(__uint_as_float(x[k] << 16) * f,
                               __uint_as_float(x[k] & 0xffff0000) * f);
    }
    if constexpr (R::kFp8 && !kRopePart) {
      // a 16-column step reads columns 4t,4t+1 as its k = 2t,2t+1 and 4t+2,4t+3 as its k =
      // 2t+8,2t+9
      const int step = (c & 7) >> 1, u = c & 1;
      *reinterpret_cast<uint2*>(row + (((step * 2) ^ (h & 7)) << 4) + u * 8) =
          make_uint2(x[0], x[2]);
      *reinterpret_cast<uint2*>(row + (((step * 2 + 1) ^ (h & 7)) << 4) + u * 8) =
          make_uint2(x[1], x[3]);
    } else {
      *reinterpret_cast<uint4*>(row + (((c & 7) ^ (h & 7)) << 4)) =
          make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
  fence_async();
  bar<1, K::kMath>();
  return back;
}

}  // namespace winnow::attention::sm90
