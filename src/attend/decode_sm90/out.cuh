// Decode on Hopper: the output of a CTA that has all of its tokens' sums (Way::kAlone, Way::kMany),
// from registers or, for V4's CTAs of many tokens, by bulk copies.
#pragma once

#include "attend/decode_sm90/span.cuh"

namespace winnow::internal::attend::decode_sm90 {

// A zero that the compiler does not move away: sums are set to zero right where they were stored.
__device__ __forceinline__ float zero_here() {
  float x;
  asm volatile("mov.f32 %0,0f00000000;" : "=f"(x));
  return x;
}

// How the lanes of a head turn their sums into 16 columns in order. fp8 tiles hold columns 2i and
// 2i+1 of a warp's 16 in rows i and i+8 of the fragment; a lane then has two neighbours. bf16 tiles
// hold columns i and i+8; then lanes of neighbouring rows exchange one value. `mix` selects bytes
// of a lane's own word and its neighbour's; `aside` is the distance from columns 2r and 2r+1.
struct ColumnOrder {
  uint32_t mix;
  int aside;
  __device__ __forceinline__ ColumnOrder(bool bf16_tile, int row)
      : mix(!bf16_tile ? 0x3210
            : row & 1  ? 0x3276
                       : 0x5410),
        aside(!bf16_tile ? 0
              : row & 1  ? 7 - row
                         : -row) {}
};

// Writes O^T times the heads' factors, 256 columns as bf16, straight from the registers: the ring
// may be in use again, and through shared memory it took a microsecond more. The eight lanes of a
// head have 16 columns, a sector of 32 bytes. kClearsSums: sums become zero for the next token,
// here, since code behind a jump is in no cache.
template <class Row, int kHeads, bool kClearsSums>
__device__ __forceinline__ void write_out(const Smem<Row, kHeads>& smem, const Args& args,
                                          int token, float (&o)[4][kHeads / 2], int warpgroup) {
  const int thread = thread_here() & 127;
  const int lane = thread & 31;
  const int warp = thread / 32;
  const int quad = lane & 3;
  const int row = lane >> 2;
  // Computed again rather than kept in registers over the loop of blocks.
  const Span span = span_here<kHeads>(args);
  constexpr bool kRopeInV = ConfigOf<Row, kHeads>::kRopeInV;
  const ColumnOrder order(!Row::kFp8 || (kRopeInV && warpgroup == 1), row);
  bf16* to = args.out + token * args.out_token_stride +
             (span.head_begin + 2 * quad) * args.out_head_stride + warpgroup * 256 +
             sixteen_of<Row, kHeads>(warp, 0) * 16 + 2 * row;
  constexpr int kNextTile = sixteen_of<Row, kHeads>(0, 1) * 16;
  const auto store_if = [](bf16* to, uint32_t x, bool exists) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p,%2,0;\n@p st.global.cs.b32 [%0],%1;\n}" ::"l"(to),
                 "r"(x), "r"((int)exists)
                 : "memory");
  };
#pragma unroll
  for (int j = 0; j < kHeads / 8; j++, to += 8 * args.out_head_stride) {
    const float2 factor = *reinterpret_cast<const float2*>(&smem.factor[8 * j + 2 * quad]);
    const int heads_left = span.head_count - (8 * j + 2 * quad);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      bf16* const head = to + k * args.out_head_stride;
      const float by = k ? factor.y : factor.x;
#pragma unroll
      for (int tile = 0; tile < 4; tile++) {
        uint32_t x = pack<true>(o[tile][4 * j + k] * by, o[tile][4 * j + k + 2] * by);
        // The last tile of either warpgroup may be RoPE's, see weigh.cuh.
        const bool bf16_tile = !Row::kFp8 || (kRopeInV && tile == 3);
        if (bf16_tile) x = __byte_perm(x, __shfl_xor_sync(~0u, x, 4), order.mix);
        store_if((bf16_tile ? head + order.aside : head) + tile * kNextTile, x, heads_left > k);
        if constexpr (kClearsSums) {
          o[tile][4 * j + k] = zero_here();
          o[tile][4 * j + k + 2] = zero_here();
        }
      }
    }
  }
}

// The same in fp32, for a CTA's only token, from shared memory: `sums` has a thread's four sums of
// each tile and eight of heads. It is called, so that its code lies after the kernel's.
template <class Row, int kHeads>
__device__ __noinline__ void put_f32(const Smem<Row, kHeads>& smem, const Args& args, int token,
                                     const float4 (*sums)[256]) {
  const int thread = thread_here();
  const int lane = thread & 31;
  const int quad = lane & 3;
  const int row = lane >> 2;
  const int warpgroup = thread / 128;
  const Span span = span_here<kHeads>(args);
  constexpr bool kRopeInV = ConfigOf<Row, kHeads>::kRopeInV;
  constexpr int kNextTile = sixteen_of<Row, kHeads>(0, 1) * 16;
  const int column = warpgroup * 256 + sixteen_of<Row, kHeads>(thread / 32 & 3, 0) * 16;
#pragma unroll 1
  for (int i = 0; i < kHeads / 4; i++) {
    // Of an eight of heads the one at 2 quad, then the one at 2 quad + 1.
    const int k = i & 1;
    const int head = i / 2 * 8 + 2 * quad + k;
    if (head >= span.head_count) continue;
    const float by = smem.factor[head];
    float* const to = f32_row(args, token, span.head_begin + head) + column;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const float4 four = sums[tile * (kHeads / 8) + i / 2][thread];
      const float first = (k ? four.y : four.x) * by;
      const float second = (k ? four.w : four.z) * by;
      const bool bf16_tile = !Row::kFp8 || (kRopeInV && tile == 3 && warpgroup == 1);
      if (bf16_tile) {
        __stcs(to + tile * kNextTile + row, first);
        __stcs(to + tile * kNextTile + row + 8, second);
      } else {
        float* const at = to + tile * kNextTile + 2 * row;
        __stcs(reinterpret_cast<float2*>(at), make_float2(first, second));
      }
    }
  }
}
// Puts the sums where put_f32() finds them, over Q, P and the rows, which are all read.
template <class Row, int kHeads>
__device__ __forceinline__ void write_out_f32(Smem<Row, kHeads>& smem, const Args& args, int token,
                                              const float (&o)[4][kHeads / 2]) {
  auto* const sums = reinterpret_cast<float4(*)[256]>(smem.q);
  static_assert(sizeof smem.q + sizeof smem.p + sizeof smem.log2_p + sizeof smem.ring >=
                kHeads / 2 * sizeof *sums);
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++)
      sums[tile * (kHeads / 8) + j][thread_here()] =
          make_float4(o[tile][4 * j], o[tile][4 * j + 1], o[tile][4 * j + 2], o[tile][4 * j + 3]);
  put_f32(smem, args, token, sums);
}

// Where the output lies before bulk copies take it. Stores from registers hold these until the L2
// has taken the data, 4,700 cycles for the 64 KB of V4 with 64 heads. So where a CTA has several
// tokens, V4's output leaves by a bulk copy a head, and the next token begins meanwhile. A head
// takes 1 KB. Lanes of the same `quad` have kHeads / 4 of the heads, which lie, in this order,
// - in one of the four stages of the token's last block, which are given back when the copies have
//   read them: kStaged heads;
// - over P: kOverP heads, if the stage does not hold all;
// - over log2 P: the rest. Score waits for this place, so these heads leave first.
// Each quad's heads begin 32 bytes aside from those of the quad before: stores then have no bank
// conflicts.
template <class Row, int kHeads, Way kWay>
struct OutputStaging {
  using Config = ConfigOf<Row, kHeads>;
  // 16 heads lose 1 % by it.
  static constexpr bool kUsed = kWay == Way::kMany && Config::kRopeInV && kHeads >= 32;
  static constexpr int kHeadBytes = 1024;
  static constexpr int kAsideBytes = 32;
  // Heads of a quad that a stage holds, and that lie over P.
  static constexpr int kFit = (Config::kStageBytes - 3 * kAsideBytes) / kHeadBytes;
  static constexpr int kStaged = kHeads / 4 < kFit ? kHeads / 4 : kFit;
  static constexpr int kOverP = 3;
  static constexpr bool kOverLog2P = kUsed && kStaged < kHeads / 4;
  // Eights of heads that do not lie over log2 P.
  static constexpr int kEights = kOverLog2P ? (kStaged + kOverP) / 2 : kHeads / 8;
  // A quad's part of the other place, and where its heads over log2 P begin; the last quad's end
  // where log2 P ends.
  static constexpr int kPartBytes = 4 * kHeadBytes + kAsideBytes;
  static constexpr int kLog2POffset =
      Config::kPBytes + Config::kLog2PBytes - 4 * kPartBytes + kAsideBytes;
  static_assert(!kOverLog2P || (2 * kEights == kStaged + kOverP && kHeads / 4 == 2 * kEights + 4 &&
                                3 * kPartBytes + kOverP * kHeadBytes <= kLog2POffset));
  uint32_t ring;
  uint32_t other;
  // The first stage of the last block; negative where the block wraps around the ring's end.
  int first_stage;
  __device__ __forceinline__ OutputStaging(const Smem<Row, kHeads>& smem, int stage_end)
      : ring(s32(smem.ring)), other(s32(smem.p)), first_stage(stage_end - 4) {}
  // The address of a quad's head: head 2j + k of the quad is head 2 quad + k of eight j.
  __device__ __forceinline__ uint32_t address(int quad, int head) const {
    const int stage =
        first_stage + quad < 0 ? first_stage + quad + Config::kStages : first_stage + quad;
    const uint32_t part = other + kPartBytes * quad;
    return head < kStaged
               ? ring + stage * Config::kStageBytes + kAsideBytes * quad + head * kHeadBytes
           : head < 2 * kEights ? part + (head - kStaged) * kHeadBytes
                                : part + kLog2POffset + (head - 2 * kEights) * kHeadBytes;
  }
};

// Puts eights kBegin to kEnd of a warpgroup's output where it leaves from, as write_out() orders
// them.
template <int kBegin, int kEnd, class Row, int kHeads, Way kWay>
__device__ __forceinline__ void stage_output(const OutputStaging<Row, kHeads, kWay>& staging,
                                             const Smem<Row, kHeads>& smem,
                                             float (&o)[4][kHeads / 2], int warpgroup) {
  const int thread = thread_here() & 127;
  const int lane = thread & 31;
  const int warp = thread / 32;
  const int quad = lane & 3;
  const int row = lane >> 2;
  const ColumnOrder order(warpgroup != 0, row);
  const int column = warpgroup * 256 + sixteen_of<Row, kHeads>(warp, 0) * 16 + 2 * row;
  constexpr int kNextTile = sixteen_of<Row, kHeads>(0, 1) * 16;
#pragma unroll
  for (int j = kBegin; j < kEnd; j++) {
    const float2 factor = *reinterpret_cast<const float2*>(&smem.factor[8 * j + 2 * quad]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const float by = k ? factor.y : factor.x;
#pragma unroll
      for (int tile = 0; tile < 4; tile++) {
        uint32_t x = pack<true>(o[tile][4 * j + k] * by, o[tile][4 * j + k + 2] * by);
        if (tile == 3) x = __byte_perm(x, __shfl_xor_sync(~0u, x, 4), order.mix);
        const int to = column + (tile == 3 ? order.aside : 0) + tile * kNextTile;
        asm volatile("st.shared.b32 [%0],%1;" ::"r"(staging.address(quad, 2 * j + k) + to * 2),
                     "r"(x)
                     : "memory");
        o[tile][4 * j + k] = zero_here();
        o[tile][4 * j + k + 2] = zero_here();
      }
    }
  }
  fence_async();
}

// Issues their copies, by all weigh warps in turn.
template <int kBegin, int kEnd, class Row, int kHeads, Way kWay>
__device__ __forceinline__ void send_output(const OutputStaging<Row, kHeads, kWay>& staging,
                                            const Args& args, int token) {
  // From lane 0, so that the compiler knows the warp's number and what follows from it as uniform.
  const int warp = __shfl_sync(~0u, thread_here() / 32, 0);
  const int quad = warp & 3;
  const Span span = span_here<kHeads>(args);
#pragma unroll 1
  for (int e = 2 * kEnd - 1 - warp / 4; e >= 2 * kBegin; e -= 2) {
    const int head = 8 * (e >> 1) + 2 * quad + (e & 1);
    if (head < span.head_count)
      bulk_store_one(args.out + token * args.out_token_stride +
                         (span.head_begin + head) * args.out_head_stride,
                     staging.address(quad, e), staging.kHeadBytes);
  }
  bulk_commit();
}

// Waits until this warp's copies have read what they copy.
__device__ __forceinline__ void wait_for_reads() {
  bulk_wait_reads();
  __syncwarp();
}

// Gives the four stages before `stage_end` back when the last token's output has left them.
template <class Row, int kHeads>
__device__ __forceinline__ void give_back(Smem<Row, kHeads>& smem, int stage_end) {
  wait_for_reads();
  const int stage = stage_end - 4 + (thread_here() & 31);
  if (stage < stage_end)
    mb_arrive(&smem.stage_empty[stage < 0 ? stage + ConfigOf<Row, kHeads>::kStages : stage]);
}

// The output of a token without rows.
template <int kHeads>
__device__ __forceinline__ void put_zeros(const Args& args, int token) {
  const Span span = span_here<kHeads>(args);
  const int thread = thread_here();
  bf16* const to = args.out + token * args.out_token_stride +
                   span.head_begin * args.out_head_stride + thread % 64 * 8;
#pragma unroll 1
  for (int head = thread / 64; head < span.head_count; head += 4)
    *reinterpret_cast<uint4*>(to + head * args.out_head_stride) = make_uint4(0, 0, 0, 0);
}

}  // namespace winnow::internal::attend::decode_sm90
