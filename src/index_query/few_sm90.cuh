// Few index heads on the device (cuda/few.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/few.cuh"
#include "cuda/record.h"
#include "index_query/kernel.h"

namespace winnow::internal::index_query {

// Strides in elements.
struct FewIndexed {
  cuda::FewTurns turns;
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

inline bool fits_few(const Params& p) {
  return p.heads > 0 && p.tokens * p.heads <= cuda::kMostFew &&
         cuda::fits_few(p.rope, p.position_stride) &&
         cuda::fit_products(p.q_token, p.q_head, p.weight_token, p.weight_head, p.out_token,
                            p.out_head, p.out_weight_token, p.out_weight_head);
}
inline FewIndexed few_of(const Params& p) {
  const auto narrow = [](int64_t x) { return static_cast<uint32_t>(x); };
  return {.turns = cuda::few_turns(p.rope, p.positions, p.position_stride),
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

// Block `block` of a token's index heads. kHalf: RoPE's pairs are of halves. kPowerOfTwo: scales
// are.
template <bool kHalf, bool kPowerOfTwo>
__device__ __forceinline__ void prepare_few(const FewIndexed& p, uint32_t token, uint32_t block) {
  const int lane = threadIdx.x % cuda::kRopeLanes;
  const uint32_t wanted = block * cuda::kFewHeads + threadIdx.x / cuda::kRopeLanes;
  const uint32_t head = wanted < p.heads ? wanted : p.heads - 1;  // and not stored
  const uint32_t position = cuda::ask_position(p.turns, token);
  const int turned_at = p.turned_at + lane * cuda::kPiece;
  const int still_at = turned_at ^ (kWidth / 2);
  const bf16* q = cuda::at_product(cuda::at_product(p.q, token, p.q_token), head, p.q_head);
  uint4 turned = cuda::load16_now(q + turned_at);
  const uint4 still = cuda::load16_now(q + still_at);
  const uint64_t weight_at = uint64_t{token} * p.weight_token + uint64_t{head} * p.weight_head;
  const uint32_t weight = p.weights_are_bf16 ? static_cast<const uint16_t*>(p.weights)[weight_at]
                                             : static_cast<const uint32_t*>(p.weights)[weight_at];
  __syncwarp();  // what is above is requested first
  const bool inside = position < p.turns.table_positions;
  const core::RopeParams rope = cuda::rope_of(p.turns, kHalf, p.inverse);
  turned = cuda::rotated(kHalf, cuda::turn_of<true>(rope, inside ? position : 0, lane), turned);
  core::Quantizer quantizer = p.quantizer;
  quantizer.power_of_two = kPowerOfTwo;
  const float amax = fmaxf(cuda::largest(turned), cuda::largest(still));
  const float scale = cuda::tile_scale<cuda::kRopeLanes>(quantizer, amax);
  const cuda::ScaleInverse by = cuda::scale_inverse(quantizer, scale);
  uint8_t* out = cuda::at_product(cuda::at_product(p.out, token, p.out_token), head, p.out_head);
  if (wanted >= p.heads || !inside) return;
  cuda::store8(out + turned_at, cuda::codes_of(quantizer, by, turned));
  cuda::store8(out + still_at, cuda::codes_of(quantizer, by, still));
  if (lane == 0)
    p.out_weights[uint64_t{token} * p.out_weight_token + uint64_t{head} * p.out_weight_head] =
        __fmul_rn(__fmul_rn(__uint_as_float(p.weights_are_bf16 ? weight << 16 : weight), scale),
                  p.factor);
}

// Calls f(std::bool_constant<kHalf>, std::bool_constant<kPowerOfTwo>).
template <class F>
void with_few(const Params& p, F&& f) {
  const auto with_scale = [&](auto half) {
    if (p.quantizer.power_of_two) f(half, std::true_type());
    else f(half, std::false_type());
  };
  if (p.rope.half) with_scale(std::true_type());
  else with_scale(std::false_type());
}

}  // namespace winnow::internal::index_query
