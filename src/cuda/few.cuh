// Few heads on the device: index_query()'s (index_query/few_sm90.cuh), and those that
// prepare_query() and rotate() turn. Such a call is a chain of waits, a position and then
// its angles, with the rows beside them, and of instructions that nothing hides. So a head has a
// warp, a pair of RoPE's values a lane (16 B where more than these is moved), its token and head
// are found without a division, and all that the kernel knows lies in two or three cache lines of
// its parameters. No thread leaves early:
// the compiler would move the loads behind that.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "cuda/heads.h"
#include "cuda/turn.h"

namespace winnow::internal::cuda {

inline constexpr int kFewThreads = 128;
inline constexpr int kFewHeads = kFewThreads / 32;  // of a block
inline constexpr int64_t kMostFew = 4096;           // heads of all tokens

// Positions and angles, strides in elements.
struct FewTurns {
  const int32_t* positions;
  const float* table;
  uint32_t position_stride, angles, sines;  // sines: from cosines to them
  uint32_t table_positions;
};
// Heads of 64 values.
struct FewTurned {
  FewTurns turns;
  bf16* x;
  uint32_t x_token, x_head, heads;
  bool inverse;
};

// Heads of a power of two of pieces, of which RoPE turns eight.
struct FewCopied {
  FewTurns turns;
  const bf16* x;
  bf16* out;
  uint32_t x_token, x_head, out_token, out_head;
  uint32_t pieces, log_pieces;  // of a token, of a head
  uint32_t first_turned;
  bool inverse;
};

template <class... T>
bool fit_products(T... numbers) {
  return (fits_product(numbers) && ...);
}
inline bool fits_few(const RopeParams& r, int64_t position_stride) {
  return r.positions > 0 && is_wide(r) &&
         fit_products(position_stride, r.position_stride, r.sine_stride, r.positions);
}
inline FewTurns few_turns(const RopeParams& r, const int32_t* positions, int64_t stride) {
  return {positions,
          r.table,
          static_cast<uint32_t>(stride),
          static_cast<uint32_t>(r.position_stride),
          static_cast<uint32_t>(r.sine_stride),
          static_cast<uint32_t>(r.positions)};
}

inline bool is_in_place(const HeadParams& p) {
  return p.x == p.out && p.x_token == p.out_token && p.x_head == p.out_head;
}
// Whether turn_few() takes a call that HeadsWay::kTurn would, or copy_few() one that is not in
// place: pairs lie in place.
inline bool fits_few(const HeadParams& p) {
  const int64_t pieces = p.width / kPiece;
  return (is_in_place(p) || (pieces & (pieces - 1)) == 0) && !p.rope.half && p.heads > 0 &&
         p.tokens * p.heads <= kMostFew && fits_few(p.rope, p.position_stride) &&
         fit_products(p.x_token, p.x_head, p.out_token, p.out_head, p.heads * pieces);
}
inline FewTurned few_turned(const HeadParams& p) {
  return {few_turns(p.rope, p.positions, p.position_stride),
          p.out + core::rope_begin(p.rope, p.width),
          static_cast<uint32_t>(p.x_token),
          static_cast<uint32_t>(p.x_head),
          static_cast<uint32_t>(p.heads),
          p.rope.inverse};
}
inline FewCopied few_copied(const HeadParams& p) {
  const auto pieces = static_cast<uint32_t>(p.width / kPiece);
  return {few_turns(p.rope, p.positions, p.position_stride),
          p.x,
          p.out,
          static_cast<uint32_t>(p.x_token),
          static_cast<uint32_t>(p.x_head),
          static_cast<uint32_t>(p.out_token),
          static_cast<uint32_t>(p.out_head),
          static_cast<uint32_t>(p.heads) * pieces,
          static_cast<uint32_t>(std::countr_zero(pieces)),
          static_cast<uint32_t>(core::rope_begin(p.rope, p.width) / kPiece),
          p.rope.inverse};
}
// Blocks of a token's heads.
WINNOW_HD inline unsigned few_blocks(int64_t heads) {
  return static_cast<unsigned>(core::ceil_div(heads, int64_t{kFewHeads}));
}

__device__ __forceinline__ uint32_t ask_position(const FewTurns& turns, uint32_t token) {
  return static_cast<uint32_t>(load_now(at_product(turns.positions, token, turns.position_stride)));
}
__device__ __forceinline__ uint32_t load4_now(const void* from) {
  return static_cast<uint32_t>(load_now(static_cast<const int32_t*>(from)));
}

// A pair of values, turned by the angles that each has; `partners` are what they turn with, and
// `sines` have the sign that the value's place gives them.
__device__ __forceinline__ uint32_t turned_pair(uint32_t values, uint32_t partners, float2 cosines,
                                                float2 sines) {
  float own[2], partner[2];
  unpack_pair(values, own);
  unpack_pair(partners, partner);
  return pack<true>(__fadd_rn(__fmul_rn(own[0], cosines.x), __fmul_rn(partner[0], sines.x)),
                    __fadd_rn(__fmul_rn(own[1], cosines.y), __fmul_rn(partner[1], sines.y)));
}

// RoPE of the pair of values that a lane has of 64, at a position inside the table or not, by all
// lanes of a warp. kHalf: pairs of RoPE are 16 lanes apart instead of in a lane.
template <bool kHalf>
__device__ __forceinline__ uint32_t turn_pair(const FewTurns& turns, uint32_t position,
                                              bool inverse, uint32_t values, int lane) {
  const uint32_t inside = position < turns.table_positions ? position : 0;
  const float* cosines = at_product(turns.table, inside, turns.angles);
  const float* sines = cosines + turns.sines;
  if constexpr (kHalf) {
    const int at = lane % 16 * 2;
    const float2 cosine = *reinterpret_cast<const float2*>(cosines + at);
    float2 sine = *reinterpret_cast<const float2*>(sines + at);
    if ((lane >= 16) == inverse) sine = {-sine.x, -sine.y};
    return turned_pair(values, __shfl_xor_sync(~0u, values, 16), cosine, sine);
  } else {
    const float cosine = cosines[lane];
    const float sine = inverse ? -sines[lane] : sines[lane];
    return turned_pair(values, __byte_perm(values, 0, 0x1032), {cosine, cosine}, {-sine, sine});
  }
}

// Block `block` of a token's heads, in place.
__device__ __forceinline__ void turn_few(const FewTurned& p, uint32_t token, uint32_t block) {
  const int lane = threadIdx.x % 32;
  const uint32_t wanted = block * kFewHeads + threadIdx.x / 32;
  const uint32_t head = wanted < p.heads ? wanted : p.heads - 1;  // and not stored
  const uint32_t position = ask_position(p.turns, token);
  auto* x =
      reinterpret_cast<uint32_t*>(at_product(at_product(p.x, token, p.x_token), head, p.x_head)) +
      lane;
  const uint32_t values = load4_now(x);
  __syncwarp();  // what is above is asked for first
  const uint32_t turned = turn_pair<false>(p.turns, position, p.inverse, values, lane);
  if (position < p.turns.table_positions && wanted < p.heads) *x = turned;
}

// Block `block` of a token's pieces, turned or as they are, to another place.
__device__ __forceinline__ void copy_few(const FewCopied& p, uint32_t token, uint32_t block) {
  constexpr int kPairs = kPiece / 2;
  const uint32_t wanted = block * kFewThreads + threadIdx.x;
  const uint32_t at = wanted < p.pieces ? wanted : p.pieces - 1;  // and not stored
  const uint32_t head = at >> p.log_pieces;
  const uint32_t piece = at - (head << p.log_pieces);
  const uint32_t position = ask_position(p.turns, token);
  const bf16* x = at_product(at_product(p.x, token, p.x_token), head, p.x_head);
  uint4 values = load16_now(x + piece * kPiece);
  const bool inside = position < p.turns.table_positions;
  const uint32_t part = piece - p.first_turned;
  if (part < kRopeLanes && inside) {
    const float* cosines = at_product(p.turns.table, position, p.turns.angles) + part * kPairs;
    const float4 c = *reinterpret_cast<const float4*>(cosines);
    const float4 s = *reinterpret_cast<const float4*>(cosines + p.turns.sines);
    const float cosine[kPairs] = {c.x, c.y, c.z, c.w};
    const float sine[kPairs] = {s.x, s.y, s.z, s.w};
    values = turned_pairs(values, p.inverse, cosine, sine);
  }
  bf16* out = at_product(at_product(p.out, token, p.out_token), head, p.out_head);
  if (inside && wanted < p.pieces) store16(out + piece * kPiece, values);
}

}  // namespace winnow::internal::cuda
