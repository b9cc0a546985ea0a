// Norm and RoPE of heads, by blocks of 256 threads, or of 64 where that spreads few heads over more
// multiprocessors: four ways over rows of 64 values or more.
//
// turn_heads   RoPE alone. 8 lanes take 64 values, each thread four such groups at once; in place
//              only the rotated ones. A token's heads share the angles that a thread has loaded.
// norm_heads   norm, then RoPE: a warp holds two heads (of up to 512 values) in registers.
// norm_latents the same for what V4 has: heads of 512, no weights, interleaved pairs last. Both
// heads
//              share the sums' shuffles and the root: 150 instructions a head, where the memory
//              leaves time for 450.
// any_heads    rows that are not aligned, or of other widths: a warp per head, the result through
//              memory, a pair of RoPE a lane.
//
// Budget: 2 B read and 2 B written a value, and 256 B of angles a token from L2. A call of few
// tokens waits for its position, then for its angles, beside the rows.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/heads.h"
#include "cuda/turn.h"

namespace winnow::internal::cuda {

inline constexpr int kHeadThreads = 256;  // of a block, at most
inline constexpr int kFewHeadThreads = 64;

enum class HeadsWay : uint8_t { kTurn, kNormShort, kNorm, kNormLatent, kAny };

// What turn_heads needs to know: groups of a head that are touched, and who takes them.
struct Cut {
  int64_t first = 0;     // value where a head's first group begins
  uint32_t groups = 0;   // of a head
  uint32_t inverse = 0;  // ceil(2^32 / groups), which divides below 2^32 / groups; 0: by one
  uint32_t blocks = 0;   // of a token
  int log_threads = 0;   // of a token
};

// How a call is done. No blocks: nothing is to be done.
struct HeadsPlan {
  HeadParams p;
  Cut cut;
  HeadsWay way = HeadsWay::kAny;
  int threads = kHeadThreads;  // of a block
  unsigned blocks = 0;
};
// By blocks of kHeadThreads, or of fewer if these do not fill the device.
HeadsPlan plan_heads(const HeadParams& p) noexcept;

// Calls f(std::integral_constant<HeadsWay, way>).
template <class F>
void with_way(HeadsWay way, F&& f) {
  switch (way) {
    case HeadsWay::kTurn: return f(std::integral_constant<HeadsWay, HeadsWay::kTurn>());
    case HeadsWay::kNormShort: return f(std::integral_constant<HeadsWay, HeadsWay::kNormShort>());
    case HeadsWay::kNorm: return f(std::integral_constant<HeadsWay, HeadsWay::kNorm>());
    case HeadsWay::kNormLatent: return f(std::integral_constant<HeadsWay, HeadsWay::kNormLatent>());
    case HeadsWay::kAny: return f(std::integral_constant<HeadsWay, HeadsWay::kAny>());
  }
}

inline constexpr int kHeadEach = 4;  // groups of 64 values that a thread has in flight

__device__ __forceinline__ void turn_heads(const HeadParams& p, const Cut& cut, uint32_t block) {
  uint32_t tokens = block;  // which tokens, and which of their blocks
  uint32_t of_token = 0;
  if (cut.blocks > 1) {
    tokens = divided(block, cut.blocks);
    of_token = block - tokens * cut.blocks;
  }
  const int64_t t =
      int64_t{tokens} * (blockDim.x >> cut.log_threads) + (threadIdx.x >> cut.log_threads);
  const int part = threadIdx.x % kRopeLanes;
  const int threads = 1 << cut.log_threads;
  const int rows = threads / kRopeLanes;  // groups that are taken at a time
  const uint32_t first = of_token * rows * kHeadEach + (threadIdx.x & (threads - 1)) / kRopeLanes;
  const int64_t position = t < p.tokens ? p.positions[t * p.position_stride] : -1;
  const bool inside = core::in_table(p.rope, position);
  const auto rope = static_cast<uint32_t>(core::rope_begin(p.rope, p.width));
  uint4 piece[kHeadEach];
  uint32_t head[kHeadEach], at[kHeadEach];
#pragma unroll
  for (int i = 0; i < kHeadEach; ++i) {
    const uint32_t group = first + i * rows;
    head[i] = cut.inverse == 0 ? group : __umulhi(group, cut.inverse);
    at[i] = static_cast<uint32_t>(cut.first) + (group - head[i] * cut.groups) * kRopeDim;
    piece[i] = {};
    if (inside && head[i] < p.heads)
      piece[i] = *reinterpret_cast<const uint4*>(p.x + t * p.x_token + head[i] * p.x_head + at[i] +
                                                 part * kPiece);
  }
  const Turn turn = turn_of(p.rope, inside ? position : 0, part);
#pragma unroll
  for (int i = 0; i < kHeadEach; ++i) {
    const uint4 turned = rotated(p.rope.half, turn, piece[i]);
    if (at[i] == rope) piece[i] = turned;
    if (inside && head[i] < p.heads)
      store16(p.out + t * p.out_token + head[i] * p.out_head + at[i] + part * kPiece, piece[i]);
  }
}

// The heads of a warp, counted as token * groups + group, kHeads of a token in each; none behind
// the last.
struct Head {
  int64_t token, head, position;
  bool inside;
};
template <int kHeads>
__device__ __forceinline__ Head head_of(const HeadParams& p, uint32_t block) {
  // In 32 bits, which hold any number of heads that fit into memory.
  const uint32_t i = block * (blockDim.x / 32) + threadIdx.x / 32;
  const auto groups = static_cast<uint32_t>(core::ceil_div(p.heads, int64_t{kHeads}));
  const uint32_t token = divided(i, groups);
  Head h{token, (i - token * groups) * int64_t{kHeads}, -1, false};
  if (h.token < p.tokens) h.position = p.positions[h.token * p.position_stride];
  h.inside = core::in_table(p.rope, h.position);
  return h;
}

// Two heads a warp, which share the angles.
inline constexpr int kNormHeads = 2;

template <int kPieces>
__device__ __forceinline__ void norm_heads(const HeadParams& p, uint32_t block) {
  const Head h = head_of<kNormHeads>(p, block);
  if (!h.inside) return;
  const int lane = threadIdx.x % 32;
  Held<kPieces> row[kNormHeads];
#pragma unroll
  for (int i = 0; i < kNormHeads; ++i) {
    const bf16* x = p.x + h.token * p.x_token + (h.head + i) * p.x_head;
    load_row(x, h.head + i < p.heads ? p.width : 0, true, lane, row[i]);
  }
  const HeldWeights<kPieces> weights(p.norm, p.width, true, lane);
  const Turn turn = turn_of(p.rope, h.position, lane % kRopeLanes);
#pragma unroll
  for (int i = 0; i < kNormHeads; ++i) {
    bf16* out = p.out + h.token * p.out_token + (h.head + i) * p.out_head;
    row[i] = norm_held(p.norm, weights, row[i], p.width, true, lane);
    rotate_held(p.rope, turn, p.width, row[i], lane);
    store_row(out, h.head + i < p.heads ? p.width : 0, true, lane, row[i]);
  }
}

// The sums of two values over a warp: lanes below 16 get that of `first`, the others that of
// `second`, each with the bits of warp_sum().
__device__ __forceinline__ float warp_sums(float first, float second, int lane) {
  const bool upper = lane >= 16;
  float own = upper ? second : first;
  own = __fadd_rn(own, __shfl_xor_sync(~0u, upper ? first : second, 16));
#pragma unroll
  for (int d = 8; d > 0; d /= 2) own = __fadd_rn(own, __shfl_xor_sync(~0u, own, d));
  return own;
}

inline constexpr int kLatentWidth = 2 * kWarpValues;

// A piece times `inverse`, rounded.
__device__ __forceinline__ uint4 scaled_piece(const uint4& piece, float inverse) {
  float v[kPiece];
  unpack(piece, v);
#pragma unroll
  for (float& x : v) x = __fmul_rn(x, inverse);
  return packed(v);
}

__device__ __forceinline__ void norm_latents(const HeadParams& p, uint32_t block) {
  const Head h = head_of<kNormHeads>(p, block);
  if (!h.inside) return;
  const int lane = threadIdx.x % 32;
  const bool both = h.head + 1 < p.heads;
  const bf16* x = p.x + h.token * p.x_token + h.head * p.x_head + lane * kPiece;
  uint4 row[kNormHeads][2] = {};
#pragma unroll
  for (int i = 0; i < kNormHeads; ++i)
    if (i == 0 || both) {
      row[i][0] = *reinterpret_cast<const uint4*>(x + i * p.x_head);
      row[i][1] = *reinterpret_cast<const uint4*>(x + i * p.x_head + kWarpValues);
    }
  // Of the rotated values, which the last 8 lanes have in their second piece.
  constexpr int kPairs = kPiece / 2;
  float cosine[kPairs], sine[kPairs];
  load_turns(p.rope, h.position, lane % kRopeLanes * kPairs, cosine, sine);
  float squares[kNormHeads];
#pragma unroll
  for (int i = 0; i < kNormHeads; ++i) {
    float v[kPiece];
    unpack(row[i][0], v);
    const float first = add_squares(0, v);
    unpack(row[i][1], v);
    squares[i] = __fadd_rn(first, add_squares(0, v));
  }
  const float inverse = inverse_of(p.norm, warp_sums(squares[0], squares[1], lane), kLatentWidth);
  bf16* out = p.out + h.token * p.out_token + h.head * p.out_head + lane * kPiece;
#pragma unroll
  for (int i = 0; i < kNormHeads; ++i) {
    const float own = __shfl_sync(~0u, inverse, 16 * i);
    const uint4 low = scaled_piece(row[i][0], own);
    uint4 high = scaled_piece(row[i][1], own);
    if (lane >= 32 - kRopeLanes) high = turned_pairs(high, p.rope.inverse, cosine, sine);
    if (i == 0 || both) {
      store16(out + i * p.out_head, low);
      store16(out + i * p.out_head + kWarpValues, high);
    }
  }
}

__device__ __forceinline__ void any_heads(const HeadParams& p, uint32_t block) {
  const Head h = head_of<1>(p, block);
  if (!h.inside) return;
  const int lane = threadIdx.x % 32;
  const bf16* x = p.x + h.token * p.x_token + h.head * p.x_head;
  bf16* out = p.out + h.token * p.out_token + h.head * p.out_head;
  const Streamed row{x, p.width, lane, false};
  const bool norm = p.norm.kind != NormKind::kNone;
  NormFactors f;
  if (norm) f = norm_factors(p.norm, row, p.width, lane);
  if (norm || out != x)
    for (int c = 0; c < row.count(); ++c) {
      const int64_t at = (int64_t{c} * 32 + lane) * kPiece;
      uint4 piece = row.piece(c);
      if (norm) piece = normed(p.norm, f, piece, at, p.width, false);
      store_piece(out, at, p.width, false, piece);
    }
  __syncwarp();  // the row is written
  const float* angles =
      p.rope.table + h.position * p.rope.position_stride + lane * p.rope.pair_stride;
  const float cosine = angles[0];
  const float sine = p.rope.inverse ? -angles[p.rope.sine_stride] : angles[p.rope.sine_stride];
  bf16* slice = out + core::rope_begin(p.rope, p.width);
  bf16* first = slice + (p.rope.half ? lane : 2 * lane);
  bf16* second = p.rope.half ? first + core::kPairs : first + 1;
  const float u = to_float(*first);
  const float v = to_float(*second);
  *first = to_bf16(__fsub_rn(__fmul_rn(u, cosine), __fmul_rn(v, sine)));
  *second = to_bf16(__fadd_rn(__fmul_rn(v, cosine), __fmul_rn(u, sine)));
}

// Block `block` of a call, by all of its threads.
template <HeadsWay kWay>
__device__ __forceinline__ void prepare_heads(const HeadsPlan& plan, uint32_t block) {
  if constexpr (kWay == HeadsWay::kTurn) turn_heads(plan.p, plan.cut, block);
  else if constexpr (kWay == HeadsWay::kNormShort) norm_heads<1>(plan.p, block);
  else if constexpr (kWay == HeadsWay::kNorm) norm_heads<2>(plan.p, block);
  else if constexpr (kWay == HeadsWay::kNormLatent) norm_latents(plan.p, block);
  else any_heads(plan.p, block);
}

}  // namespace winnow::internal::cuda
