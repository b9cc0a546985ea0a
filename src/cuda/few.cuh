// Few heads on the device: index_query()'s (index_query/few_sm90.cuh), and those that
// prepare_query() and rotate() turn. Such a call is a chain of waits, a position and then
// its angles, with the rows beside them, and of instructions that nothing hides. So blocks are
// small, a thread has 16 B of a head (index heads: two of them), token and head are found without a
// division, and all that the kernel knows lies in two or three cache lines of its parameters. No
// thread returns early: the compiler would move the loads after that.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "cuda/heads.h"
#include "cuda/turn.h"

namespace winnow::internal::cuda {

inline constexpr int kFewThreads = 64;
inline constexpr int kFewHeads = kFewThreads / kRopeLanes;  // of a block, 8 lanes each
inline constexpr int64_t kMostFew = 4096;                   // heads of all tokens
inline constexpr int64_t kMostCopied = 1024;                // ... that are not turned in place

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
  const bool in_place = is_in_place(p);
  return (in_place || (pieces & (pieces - 1)) == 0) && !p.rope.half && p.heads > 0 &&
         p.tokens * p.heads <= (in_place ? kMostFew : kMostCopied) &&
         fits_few(p.rope, p.position_stride) &&
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
__device__ __forceinline__ RopeParams rope_of(const FewTurns& turns, bool half, bool inverse) {
  RopeParams rope;
  rope.table = turns.table;
  rope.position_stride = turns.angles;
  rope.sine_stride = turns.sines;
  rope.pair_stride = 1;
  rope.half = half;
  rope.inverse = inverse;
  return rope;
}

// Block `block` of a token's heads, in place.
__device__ __forceinline__ void turn_few(const FewTurned& p, uint32_t token, uint32_t block) {
  constexpr int kPairs = kPiece / 2;
  const int lane = threadIdx.x % kRopeLanes;
  const uint32_t wanted = block * kFewHeads + threadIdx.x / kRopeLanes;
  const uint32_t head = wanted < p.heads ? wanted : p.heads - 1;  // and not stored
  const uint32_t position = ask_position(p.turns, token);
  bf16* x = at_product(at_product(p.x, token, p.x_token), head, p.x_head) + lane * kPiece;
  const uint4 piece = load16_now(x);
  __syncwarp();  // what is above is requested first
  const bool inside = position < p.turns.table_positions;
  float cosine[kPairs], sine[kPairs];
  load_turns<true>(rope_of(p.turns, false, p.inverse), inside ? position : 0, lane * kPairs, cosine,
                   sine);
  const uint4 turned = turned_pairs(piece, p.inverse, cosine, sine);
  if (inside && wanted < p.heads) store16(x, turned);
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
    float cosine[kPairs], sine[kPairs];
    load_turns<true>(rope_of(p.turns, false, p.inverse), position, static_cast<int>(part) * kPairs,
                     cosine, sine);
    values = turned_pairs(values, p.inverse, cosine, sine);
  }
  bf16* out = at_product(at_product(p.out, token, p.out_token), head, p.out_head);
  if (inside && wanted < p.pieces) store16(out + piece * kPiece, values);
}

}  // namespace winnow::internal::cuda
