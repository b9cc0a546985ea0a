// Decode on Hopper: the output, from registers or, where a CTA goes on, by bulk copies.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// O^T times the heads' factors, 256 columns, as bf16, straight from the registers: the ring may be
// filled again, and through shared memory it took a microsecond more. The eight lanes of a head
// have 16 columns: a sector of 32 bytes. fp8 tiles hold dims 2i and 2i+1 of a warp's 16 in rows i
// and i+8, bf16 tiles dims i and i+8, of which neighbours exchange one. kMany: zeros for the next
// token, here, since code behind a jump is in no cache.
template <class R, int N, bool kMany>
__device__ __forceinline__ void write_out(const Smem<R, N>& sm, const Args& p, int token,
                                          float (&o)[4][N / 2], int g) {
  const int t = thread_here() & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  const Span sp = job<N>(p);  // again, rather than in registers of the loop over blocks
  const bool plain = !R::kFp8 || (Config<R, N>::kRopeInV && g == 1);
  const uint32_t mix = !plain ? 0x3210 : r & 1 ? 0x3276 : 0x5410;
  const int aside = !plain ? 0 : r & 1 ? 7 - r : -r;  // of columns 2r and 2r + 1
  bf16* to = p.out + token * p.out_token + (sp.head0 + 2 * quad) * p.out_head + g * 256 +
             sixteen<R, N>(w, 0) * 16 + 2 * r;
  constexpr int kTo = sixteen<R, N>(0, 1) * 16;  // the next tile
  const auto zero = [] {
    float x;
    asm volatile("mov.f32 %0,0f00000000;" : "=f"(x));
    return x;
  };
  const auto put = [](bf16* at, uint32_t x, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%2,0;\n@p st.global.cs.b32 [%0],%1;\n}" ::"l"(at),
                 "r"(x), "r"((int)there)
                 : "memory");
  };
#pragma unroll
  for (int j = 0; j < N / 8; j++, to += 8 * p.out_head) {
    const float2 f = *reinterpret_cast<const float2*>(&sm.factor[8 * j + 2 * quad]);
    const int left = sp.heads - (8 * j + 2 * quad);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      bf16* const at = to + k * p.out_head;
      const float by = k ? f.y : f.x;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        uint32_t x = pack<true>(o[m][4 * j + k] * by, o[m][4 * j + k + 2] * by);
        const bool bf = !R::kFp8 || (Config<R, N>::kRopeInV && m == 3);  // of either warpgroup
        if (bf) x = __byte_perm(x, __shfl_xor_sync(~0u, x, 4), mix);
        put((bf ? at + aside : at) + m * kTo, x, left > k);
        if constexpr (kMany) o[m][4 * j + k] = zero(), o[m][4 * j + k + 2] = zero();
      }
    }
  }
}

// Stores hold the registers until the L2 has taken them, 4,700 cycles for V4's 64 KB of 64 heads.
// So where a CTA has several tokens, V4's output leaves by bulk copies of a head each, and the next
// token begins meanwhile. It lies in the stages of the token's last block, which are given back
// when they are read, and what they do not hold over P and log2 P. Score waits for log2 P's place,
// so those heads leave first. The heads of a quad of lanes, N / 4, are in a stage of their own,
// then in a part of the other place, 32 bytes aside from the quad's before: stores do not conflict.
template <class R, int N, Way W>
struct Leaving {
  using K = Config<R, N>;
  // 16 heads lose 1 % by it.
  static constexpr bool kSo = W == Way::kMany && K::kRopeInV && N >= 32;
  static constexpr int kHead = 1024, kAside = 32;  // bytes
  static constexpr int kFit = (K::kStageBytes - 3 * kAside) / kHead;
  static constexpr int kStaged = N / 4 < kFit ? N / 4 : kFit, kOverP = 3;  // heads of a quad
  static constexpr bool kOverY = kSo && kStaged < N / 4;
  // Eights of heads that are not over log2 P; a quad's part; the last quad's ends with log2 P.
  static constexpr int kEights = kOverY ? (kStaged + kOverP) / 2 : N / 8;
  static constexpr int kPart = 4 * kHead + kAside,
                       kNext = K::kPBytes + K::kYBytes - 4 * kPart + kAside;
  static_assert(!kOverY || (2 * kEights == kStaged + kOverP && N / 4 == 2 * kEights + 4 &&
                            3 * kPart + kOverP * kHead <= kNext));
  uint32_t ring, other;
  int slot;  // of the last block's first stage
  __device__ __forceinline__ Leaving(const Smem<R, N>& sm, int behind)
      : ring(s32(sm.ring)), other(s32(sm.p)), slot(behind - 4) {}
  // Where a quad's head 2j + k of the eights is.
  __device__ __forceinline__ uint32_t at(int quad, int e) const {
    const int stage = slot + quad < 0 ? slot + quad + K::kStages : slot + quad;
    const uint32_t part = other + kPart * quad;
    return e < kStaged       ? ring + stage * K::kStageBytes + kAside * quad + e * kHead
           : e < 2 * kEights ? part + (e - kStaged) * kHead
                             : part + kNext + (e - 2 * kEights) * kHead;
  }
};

// Eights kFrom to kEnd of a warpgroup's output to where it leaves from, as in write_out().
template <int kFrom, int kEnd, class R, int N, Way W>
__device__ __forceinline__ void put_out(const Leaving<R, N, W>& out, const Smem<R, N>& sm,
                                        float (&o)[4][N / 2], int g) {
  const int t = thread_here() & 127, lane = t & 31, w = t / 32, quad = lane & 3, r = lane >> 2;
  const uint32_t mix = g == 0 ? 0x3210 : r & 1 ? 0x3276 : 0x5410;
  const int aside = g == 0 ? 0 : r & 1 ? 7 - r : -r;  // of columns 2r and 2r + 1
  const int column = g * 256 + sixteen<R, N>(w, 0) * 16 + 2 * r;
  constexpr int kTo = sixteen<R, N>(0, 1) * 16;  // the next tile
  const auto zero = [] {
    float x;
    asm volatile("mov.f32 %0,0f00000000;" : "=f"(x));
    return x;
  };
#pragma unroll
  for (int j = kFrom; j < kEnd; j++) {
    const float2 f = *reinterpret_cast<const float2*>(&sm.factor[8 * j + 2 * quad]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float by = k ? f.y : f.x;
#pragma unroll
      for (int m = 0; m < 4; m++) {
        uint32_t x = pack<true>(o[m][4 * j + k] * by, o[m][4 * j + k + 2] * by);
        if (m == 3) x = __byte_perm(x, __shfl_xor_sync(~0u, x, 4), mix);
        const int to = column + (m == 3 ? aside : 0) + m * kTo;
        asm volatile("st.shared.b32 [%0],%1;" ::"r"(out.at(quad, 2 * j + k) + to * 2), "r"(x)
                     : "memory");
        o[m][4 * j + k] = zero(), o[m][4 * j + k + 2] = zero();
      }
    }
  }
  fence_async();
}

// Their copies, by all weigh warps in turn.
template <int kFrom, int kEnd, class R, int N, Way W>
__device__ __forceinline__ void send_out(const Leaving<R, N, W>& out, const Args& p, int token) {
  const int warp = __shfl_sync(~0u, thread_here() / 32, 0);  // uniform, and so is what comes of it
  const int quad = warp & 3;
  const Span sp = job<N>(p);
#pragma unroll 1
  for (int e = 2 * kEnd - 1 - warp / 4; e >= 2 * kFrom; e -= 2) {
    const int h = 8 * (e >> 1) + 2 * quad + (e & 1);
    if (h < sp.heads)
      bulk_store_one(p.out + token * p.out_token + (sp.head0 + h) * p.out_head, out.at(quad, e),
                     out.kHead);
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this warp's copies have read what they copy.
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();
}

// Gives the stages before `behind` back when the last token's output has left them.
template <class R, int N>
__device__ __forceinline__ void give_back(Smem<R, N>& sm, int behind) {
  wait_for_reads();
  const int slot = behind - 4 + (thread_here() & 31);
  if (slot < behind) mb_arrive(&sm.empty[slot < 0 ? slot + Config<R, N>::kStages : slot]);
}

// The output of a token without rows.
template <int N>
__device__ __forceinline__ void put_zeros(const Args& p, int token) {
  const Span sp = job<N>(p);
  const int t = thread_here();
  bf16* const to = p.out + token * p.out_token + sp.head0 * p.out_head + t % 64 * 8;
#pragma unroll 1
  for (int h = t / 64; h < sp.heads; h += 4)
    *reinterpret_cast<uint4*>(to + h * p.out_head) = make_uint4(0, 0, 0, 0);
}

}  // namespace winnow::internal::attend::decode_sm90
