// Few heads on the device: index_query()'s, and what V3.2's prepare_query() turns in place. Such a
// call is a chain of waits, a position and then its angles, with the rows beside them. So a block
// has 64 threads, eight lanes a head, its token and head are found without a division, position and
// row are asked for before anything else, and all that the kernel knows lies in two or three cache
// lines of its parameters. No thread leaves early: the compiler would move the loads behind that.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/heads.h"
#include "cuda/record.h"
#include "index_query/kernel.h"

namespace winnow::internal::index_query {

inline constexpr int kFewThreads = 64;
inline constexpr int kFewHeads = kFewThreads / cuda::kRopeLanes;  // of a block

// Positions and angles, strides in elements.
struct FewTurns {
  const int32_t* positions;
  const float* table;
  uint32_t position_stride, angles, sines;  // sines: from cosines to them
  uint32_t table_positions;
};
struct FewIndexed {
  FewTurns turns;
  const bf16* q;
  const void* weights;
  uint32_t q_token, q_head, weight_token, weight_head;
  uint32_t heads;
  bool weights_are_bf16, inverse;
  uint8_t turned_at;  // value where the rotated half begins
  float factor;
  core::Quantizer quantizer;
  uint8_t* out;
  float* out_weights;
  uint32_t out_token, out_head, out_weight_token, out_weight_head;
};
// Heads of 64 values.
struct FewTurned {
  FewTurns turns;
  bf16* x;
  uint32_t x_token, x_head, heads;
  bool inverse;
};

template <class... T>
bool fit_products(T... numbers) {
  return (cuda::fits_product(numbers) && ...);
}
inline bool fits(const core::RopeParams& r, int64_t position_stride) {
  return r.positions > 0 && cuda::is_wide(r) &&
         fit_products(position_stride, r.position_stride, r.sine_stride, r.positions);
}
inline FewTurns few_turns(const core::RopeParams& r, const int32_t* positions, int64_t stride) {
  return {positions,
          r.table,
          static_cast<uint32_t>(stride),
          static_cast<uint32_t>(r.position_stride),
          static_cast<uint32_t>(r.sine_stride),
          static_cast<uint32_t>(r.positions)};
}

inline bool fits(const Params& p) {
  return fits(p.rope, p.position_stride) &&
         fit_products(p.q_token, p.q_head, p.weight_token, p.weight_head, p.heads, p.out_token,
                      p.out_head, p.out_weight_token, p.out_weight_head);
}
inline FewIndexed few_of(const Params& p) {
  const auto narrow = [](int64_t x) { return static_cast<uint32_t>(x); };
  return {.turns = few_turns(p.rope, p.positions, p.position_stride),
          .q = p.q,
          .weights = p.weights,
          .q_token = narrow(p.q_token),
          .q_head = narrow(p.q_head),
          .weight_token = narrow(p.weight_token),
          .weight_head = narrow(p.weight_head),
          .heads = narrow(p.heads),
          .weights_are_bf16 = p.weights_are_bf16,
          .inverse = p.rope.inverse,
          .turned_at = static_cast<uint8_t>(core::rope_begin(p.rope, kWidth)),
          .factor = p.factor,
          .quantizer = p.quantizer,
          .out = static_cast<uint8_t*>(p.out),
          .out_weights = p.out_weights,
          .out_token = narrow(p.out_token),
          .out_head = narrow(p.out_head),
          .out_weight_token = narrow(p.out_weight_token),
          .out_weight_head = narrow(p.out_weight_head)};
}
// Of heads that HeadsWay::kTurn turns in place.
inline bool fits(const cuda::HeadParams& p) {
  const bool in_place = p.x == p.out && p.x_token == p.out_token && p.x_head == p.out_head;
  return in_place && !p.rope.half && fits(p.rope, p.position_stride) &&
         fit_products(p.x_token, p.x_head, p.heads);
}
inline FewTurned few_of(const cuda::HeadParams& p) {
  return {few_turns(p.rope, p.positions, p.position_stride),
          p.out + core::rope_begin(p.rope, p.width),
          static_cast<uint32_t>(p.x_token),
          static_cast<uint32_t>(p.x_head),
          static_cast<uint32_t>(p.heads),
          p.rope.inverse};
}
WINNOW_HD inline unsigned few_blocks(int64_t heads) {
  return static_cast<unsigned>(core::ceil_div(heads, int64_t{kFewHeads}));
}

__device__ __forceinline__ uint32_t ask_position(const FewTurns& turns, uint32_t token) {
  return static_cast<uint32_t>(
      cuda::load_now(cuda::at_product(turns.positions, token, turns.position_stride)));
}
// The angles of a position inside the table.
__device__ __forceinline__ core::RopeParams rope_of(const FewTurns& turns, bool half,
                                                    bool inverse) {
  core::RopeParams rope;
  rope.table = turns.table;
  rope.position_stride = turns.angles;
  rope.sine_stride = turns.sines;
  rope.pair_stride = 1;
  rope.half = half;
  rope.inverse = inverse;
  return rope;
}

// Block `block` of a token's index heads. kHalf: RoPE's pairs are of halves.
template <bool kHalf>
__device__ __forceinline__ void prepare_few(const FewIndexed& p, uint32_t token, uint32_t block) {
  const int lane = threadIdx.x % cuda::kRopeLanes;
  const uint32_t wanted = block * kFewHeads + threadIdx.x / cuda::kRopeLanes;
  const uint32_t head = wanted < p.heads ? wanted : p.heads - 1;  // and not stored
  const uint32_t position = ask_position(p.turns, token);
  const int turned_at = p.turned_at + lane * cuda::kPiece;
  const int still_at = turned_at ^ (kWidth / 2);
  const bf16* q = cuda::at_product(cuda::at_product(p.q, token, p.q_token), head, p.q_head);
  uint4 turned = cuda::load16_now(q + turned_at);
  const uint4 still = cuda::load16_now(q + still_at);
  const uint64_t weight_at =
      uint64_t{token} * p.weight_token + uint64_t{head} * p.weight_head;
  const float weight = p.weights_are_bf16
                           ? to_float(static_cast<const bf16*>(p.weights)[weight_at])
                           : static_cast<const float*>(p.weights)[weight_at];
  __syncwarp();  // what is above is asked for first
  const bool inside = position < p.turns.table_positions;
  const core::RopeParams rope = rope_of(p.turns, kHalf, p.inverse);
  turned =
      cuda::rotated(kHalf, cuda::turn_of<true>(rope, inside ? position : 0, lane), turned);
  const float amax = fmaxf(cuda::largest(turned), cuda::largest(still));
  const float scale = cuda::tile_scale<cuda::kRopeLanes>(p.quantizer, amax);
  const cuda::ScaleInverse by = cuda::scale_inverse(p.quantizer, scale);
  uint8_t* out = cuda::at_product(cuda::at_product(p.out, token, p.out_token), head, p.out_head);
  if (wanted >= p.heads || !inside) return;
  cuda::store8(out + turned_at, cuda::codes_of(p.quantizer, by, turned));
  cuda::store8(out + still_at, cuda::codes_of(p.quantizer, by, still));
  if (lane == 0)
    p.out_weights[uint64_t{token} * p.out_weight_token + uint64_t{head} * p.out_weight_head] =
        __fmul_rn(__fmul_rn(weight, scale), p.factor);
}

// Block `block` of a token's heads that are turned in place.
__device__ __forceinline__ void turn_few(const FewTurned& p, uint32_t token, uint32_t block) {
  constexpr int kPairs = cuda::kPiece / 2;
  const int lane = threadIdx.x % cuda::kRopeLanes;
  const uint32_t wanted = block * kFewHeads + threadIdx.x / cuda::kRopeLanes;
  const uint32_t head = wanted < p.heads ? wanted : p.heads - 1;  // and not stored
  const uint32_t position = ask_position(p.turns, token);
  bf16* x = cuda::at_product(cuda::at_product(p.x, token, p.x_token), head, p.x_head) +
            lane * cuda::kPiece;
  const uint4 piece = cuda::load16_now(x);
  __syncwarp();
  const bool inside = position < p.turns.table_positions;
  float cosine[kPairs], sine[kPairs];
  cuda::load_turns<true>(rope_of(p.turns, false, p.inverse), inside ? position : 0, lane * kPairs,
                         cosine, sine);
  const uint4 turned = cuda::turned_pairs(piece, p.inverse, cosine, sine);
  if (inside && wanted < p.heads) cuda::store16(x, turned);
}

}  // namespace winnow::internal::index_query
