// write on the device: a warp per token (or two) holds its row in registers, 16 B a lane and piece,
// through norm, RoPE and Hadamard (cuda/prologue.h); the maximum of a tile by shuffles. Bytes are
// the budget: 1,152 in and 656 out per token of V3.2.
#pragma once

#include <cuda_runtime.h>

#include "cuda/record.h"
#include "model/records.h"
#include "write/kernel.h"

namespace winnow::internal::write::sm90 {

struct WriteCall {
  Params p;
  bool wide;       // rows are read 16 B at a time
  bool norm_wide;  // ... and the weights of their norm
};

// Values that the norm takes: of V3.2's all but k_pe.
template <class R>
inline constexpr int kNormed = R::kDim > V32::kNope ? V32::kNope : R::kDim;

template <class R, int kPieces>
__device__ __forceinline__ void load_values(const Params& p, int64_t t, bool wide, int lane,
                                            cuda::Held<kPieces>& row) {
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    row.pieces[c] = cuda::load_piece(p.kv + t * p.kv_stride, at, R::kNope, wide);
    if constexpr (R::kRope > 0)
      if (at >= R::kNope)
        row.pieces[c] =
            cuda::load_piece(p.rope_part + t * p.rope_stride, at - R::kNope, R::kRope, wide);
  }
}

// Norm, RoPE and Hadamard of a row; `turn` is that of the token's position.
template <class R, int kPieces, int kNormedPieces>
__device__ __forceinline__ void prepare(const WriteCall& call, const cuda::Turn& turn,
                                        const cuda::HeldWeights<kNormedPieces>& weights,
                                        cuda::Held<kPieces>& row, int lane) {
  const Params& p = call.p;
  if (p.norm.kind != NormKind::kNone) {
    cuda::Held<kNormedPieces> part;
#pragma unroll
    for (int c = 0; c < kNormedPieces; ++c) part.pieces[c] = row.pieces[c];
    part = cuda::norm_held(p.norm, weights, part, kNormed<R>, call.norm_wide, lane);
#pragma unroll
    for (int c = 0; c < kNormedPieces; ++c) row.pieces[c] = part.pieces[c];
  }
  if (p.rope.table) cuda::rotate_held(p.rope, turn, R::kDim, row, lane);
  if constexpr (R::kDim == kIndexDim)
    if (p.hadamard) row.pieces[0] = cuda::hadamard(row.pieces[0], lane);
}

// Token t, by a warp; those behind the last are none. Slot, position, row and weights are requested
// together, then the angles.
template <class R>
__device__ __forceinline__ void write_token(const WriteCall& call, int64_t t, int lane) {
  const Params& p = call.p;
  if (t >= p.tokens) return;
  constexpr int kPieces = ceil_div(R::kDim, cuda::kWarpValues);
  const int64_t slot = p.slots[t * p.slot_stride];
  const int64_t position = p.rope.table ? p.positions[t * p.position_stride] : 0;
  cuda::Held<kPieces> row;
  if (call.wide) load_values<R>(p, t, true, lane, row);
  else load_values<R>(p, t, false, lane, row);
  const bool inside = p.rope.table == nullptr || in_table(p.rope, position);
  const bool stored = inside && slot >= 0 && slot < p.cache.pages * p.cache.page;
  if (p.prologue) {
    const cuda::HeldWeights<ceil_div(kNormed<R>, cuda::kWarpValues)> weights(p.norm, kNormed<R>,
                                                                             call.norm_wide, lane);
    if (!stored) return;
    cuda::Turn turn;
    if (p.rope.table) turn = cuda::turn_of(p.rope, position, lane % cuda::kRopeLanes);
    prepare<R>(call, turn, weights, row, lane);
  }
  if (!stored) return;
  const cuda::Spot spot = cuda::spot_of(p.cache, slot);
  cuda::store_record<R>(p.quantizer, row, spot.page, spot.offset, p.cache.page, lane);
}

// Whether write_plain() or write_plain_keys() takes the call: rows, weights, angles and pages are
// aligned, pages have a power of two of records, and all is found by products of 32 bits; latents
// have RMS without a bias and RoPE over pairs in place last, keys LayerNorm.
inline bool is_plain(const WriteCall& call) {
  const Params& p = call.p;
  const auto fits = cuda::fits_product;
  if (!call.wide || !p.prologue || p.rope.table == nullptr || !cuda::is_wide(p.rope)) return false;
  if ((p.cache.page & (p.cache.page - 1)) != 0 || !cuda::is_wide(p.cache.data, p.cache.stride))
    return false;
  if (!fits(p.tokens) || !fits(p.kv_stride) || !fits(p.rope_stride) || !fits(p.slot_stride) ||
      !fits(p.position_stride) || !fits(p.rope.positions) || !fits(p.rope.position_stride) ||
      !fits(p.cache.stride) || !fits(p.cache.pages * p.cache.page))
    return false;
  if (p.cache.format == CacheFormat::kIndexKeys)
    return p.norm.kind == NormKind::kLayer && p.norm.weight != nullptr && call.norm_wide;
  return cuda::is_plain(p.norm) && !p.rope.half && !p.rope.first;
}

// What a lane of a plain call knows of its token. Those behind the last are the last one, and not
// stored.
struct PlainToken {
  uint32_t token, position, slot;
  bool in_call;

  __device__ __forceinline__ PlainToken(const Params& p, uint32_t wanted) {
    const auto tokens = static_cast<uint32_t>(p.tokens);
    in_call = wanted < tokens;
    token = in_call ? wanted : tokens - 1;
  }
  __device__ __forceinline__ void ask(const Params& p) {
    const int32_t* from = cuda::at_product(p.positions, token, p.position_stride);
    position = static_cast<uint32_t>(cuda::load_now(from));
    const int64_t any = cuda::load_now(cuda::at_product(p.slots, token, p.slot_stride));
    slot = in_call && any >> 31 == 0 ? static_cast<uint32_t>(any) : UINT32_MAX;
  }
  __device__ __forceinline__ bool in_table(const Params& p) const {
    return position < static_cast<uint32_t>(p.rope.positions);
  }
  __device__ __forceinline__ bool is_stored(const Params& p) const {
    return in_table(p) && slot < static_cast<uint32_t>(p.cache.pages) * p.cache.page;
  }
  // The angles of its position alone, or of the first one if it has none.
  __device__ __forceinline__ core::RopeParams angles(const Params& p) const {
    core::RopeParams rope = p.rope;
    rope.table = cuda::at_product(p.rope.table, in_table(p) ? position : 0, p.rope.position_stride);
    rope.pair_stride = 1;
    return rope;
  }
  __device__ __forceinline__ cuda::Spot spot(const Params& p) const {
    const uint32_t page = slot >> (31 - __clz(p.cache.page));
    return {cuda::at_product(p.cache.data, page, p.cache.stride),
            static_cast<int32_t>(slot & (static_cast<uint32_t>(p.cache.page) - 1))};
  }
};

// write_token() for tokens of a plain call of latents that share warp `warp`, kLanes lanes each, in
// fewer registers and instructions: of many tokens two share a warp. No token leaves early, because
// the compiler would move the loads of its row behind that. kWeightsFirst: weights are requested
// with the row; else they come from L1 when they are due.
template <class R, int kLanes, bool kWeightsFirst>
__device__ __forceinline__ void write_plain(const WriteCall& call, uint32_t warp, int warp_lane) {
  constexpr int kTokens = 32 / kLanes;
  constexpr int kStep = kLanes * cuda::kPiece;
  constexpr int kPieces = kNormed<R> / kStep;
  constexpr bool kApart = R::kDim > kNormed<R>;  // what RoPE turns is not normalised
  constexpr int kTurnedLane = kApart ? 0 : kLanes - cuda::kRopeLanes;
  const Params& p = call.p;
  if (warp * kTokens >= static_cast<uint32_t>(p.tokens)) return;
  const int lane = warp_lane % kLanes;
  PlainToken of(p, warp * kTokens + warp_lane / kLanes);
  const bool turns = lane >= kTurnedLane && lane < kTurnedLane + cuda::kRopeLanes;
  const bf16* from = cuda::at_product(p.kv, of.token, p.kv_stride) + lane * cuda::kPiece;
  const int part = lane % cuda::kRopeLanes;  // of what RoPE turns, and requested by all lanes
  const bf16* turned_from =
      cuda::at_product(p.rope_part, of.token, p.rope_stride) + part * cuda::kPiece;
  uint4 row[kPieces], apart{};
  if (kApart) apart = cuda::load16_now(turned_from);
  of.ask(p);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const bool here = !kApart && c == kPieces - 1 && turns;
    row[c] = *reinterpret_cast<const uint4*>(here ? turned_from : from + c * kStep);
  }
  const float* weights = p.norm.weight + lane * cuda::kPiece;
  float weight[kPieces][cuda::kPiece];
  const auto load_weights = [&](int c) {
    cuda::load_floats(weights + c * kStep, 0, cuda::kPiece, true, weight[c]);
  };
  if (kWeightsFirst)
#pragma unroll
    for (int c = 0; c < kPieces; ++c) load_weights(c);
  float cosine[cuda::kPiece / 2], sine[cuda::kPiece / 2];
  cuda::load_turns<true>(of.angles(p), 0, part * (cuda::kPiece / 2), cosine, sine);
  float squares[kPieces];
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    float v[cuda::kPiece];
    cuda::unpack(row[c], v);
    squares[c] = cuda::add_squares(0, v);
    // Unpacked once more below: values of two tokens do not fit into the registers.
    if (kPieces == 4)
      asm volatile("" : "+r"(row[c].x), "+r"(row[c].y), "+r"(row[c].z), "+r"(row[c].w));
  }
  // In the order of a warp a token, whose lanes have the pieces of two of these.
  float sum = __fadd_rn(squares[0], squares[kPieces / 2]);
  if (kPieces == 4) sum = __fadd_rn(sum, __fadd_rn(squares[1], squares[3]));
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  const float inverse = cuda::inverse_of(p.norm, sum, kNormed<R>);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    if (!kWeightsFirst) asm volatile("" ::: "memory");  // no loads before
    if (!kWeightsFirst) load_weights(c);
    row[c] = cuda::normed(inverse, row[c], weight[c]);
  }
  uint4& turned = kApart ? apart : row[kPieces - 1];
  if (turns) turned = cuda::turned_pairs(turned, p.rope.inverse, cosine, sine);
  const bool stored = of.is_stored(p);
  const cuda::Spot spot = of.spot(p);
  cuda::store_tiles<R, kLanes>(p.quantizer, row, stored, spot, p.cache.page, lane);
  if (stored && turns)
    cuda::store16(spot.page + R::rope(spot.offset, p.cache.page) + part * sizeof(turned), turned);
}

// write_token() for a plain call of index keys: four keys share warp `warp`, 8 lanes each. A lane
// has 8 values of the half that RoPE turns and 8 of the other. kEarly: weights and angles are asked
// for as soon as they can be; else when they are due, in fewer registers. kV32: RoPE turns the
// first 64 values, in halves, there is no Hadamard, and scales are powers of two.
inline constexpr int kKeyLanes = cuda::kRopeLanes;
inline constexpr int kKeysOfWarp = 32 / kKeyLanes;
inline bool are_v32_keys(const Params& p) {
  return p.rope.half && p.rope.first && !p.hadamard && p.quantizer.power_of_two;
}
template <bool kEarly, bool kV32 = false>
__device__ __forceinline__ void write_plain_keys(const WriteCall& call, uint32_t warp,
                                                 int warp_lane) {
  using R = IndexKeys;
  constexpr int kHalf = R::kDim / 2;
  const Params& p = call.p;
  if (warp * kKeysOfWarp >= static_cast<uint32_t>(p.tokens)) return;
  const int lane = warp_lane % kKeyLanes;
  PlainToken of(p, warp * kKeysOfWarp + warp_lane / kKeyLanes);
  const bf16* from = cuda::at_product(p.kv, of.token, p.kv_stride) + lane * cuda::kPiece;
  uint4 row[2] = {cuda::load16_now(from), cuda::load16_now(from + kHalf)};
  of.ask(p);
  float v[2][cuda::kPiece], weight[2][cuda::kPiece], bias[2][cuda::kPiece] = {};
  const auto load_weights = [&](int c) {
    const int at = c * kHalf + lane * cuda::kPiece;
    cuda::load_floats(p.norm.weight, at, R::kDim, true, weight[c]);
    if (p.norm.bias != nullptr) cuda::load_floats(p.norm.bias, at, R::kDim, true, bias[c]);
  };
  if (kEarly) load_weights(0);
  if (kEarly) load_weights(1);
  cuda::Turn turn;
  const auto angles = [&] {
    core::RopeParams rope = of.angles(p);
    if (kV32) rope.half = true;
    return cuda::turn_of<true>(rope, 0, lane);
  };
  if (kEarly) turn = angles();
  // Of both pieces, in the order of write_token(), where other lanes have the second one.
  const auto sum = [](float first, float second) {
    float x = __fadd_rn(first, second);
#pragma unroll
    for (int d = kKeyLanes / 2; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, d));
    return x;
  };
  cuda::unpack(row[0], v[0]);
  cuda::unpack(row[1], v[1]);
  cuda::NormFactors f;
  f.mean = cuda::mean_of(sum(cuda::add_values(0, v[0]), cuda::add_values(0, v[1])), R::kDim);
  const float squares = sum(cuda::add_squares(0, v[0], f.mean, cuda::kPiece),
                            cuda::add_squares(0, v[1], f.mean, cuda::kPiece));
  f.inverse = cuda::inverse_of(p.norm, squares, R::kDim);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (!kEarly) asm volatile("" ::: "memory");  // no loads before
    if (!kEarly) load_weights(c);
    row[c] = cuda::normed(f, v[c], weight[c], p.norm.bias != nullptr, bias[c]);
  }
  if (!kEarly) asm volatile("" ::: "memory");
  if (!kEarly) turn = angles();
  const bool first = kV32 || p.rope.first;
  const uint4 turned =
      cuda::rotated(kV32 || p.rope.half, turn, cuda::either(first, row[0], row[1]));
  row[0] = cuda::either(first, turned, row[0]);
  row[1] = cuda::either(first, row[1], turned);
  if (!kV32 && p.hadamard) cuda::hadamard(row[0], row[1], lane);
  core::Quantizer quantizer = p.quantizer;
  if (kV32) quantizer.power_of_two = true;
  const float amax = fmaxf(cuda::largest(row[0]), cuda::largest(row[1]));
  const float scale = cuda::tile_scale<kKeyLanes>(quantizer, amax);
  if (!of.is_stored(p)) return;
  const cuda::Spot spot = of.spot(p);
  std::byte* to = spot.page + R::row(spot.offset, p.cache.page) + lane * cuda::kPiece;
  const cuda::ScaleInverse by = cuda::scale_inverse(quantizer, scale);
#pragma unroll
  for (int c = 0; c < 2; ++c) cuda::store8(to + c * kHalf, cuda::codes_of(quantizer, by, row[c]));
  if (lane == 0)
    core::put_scale(reinterpret_cast<float*>(spot.page + R::scales(spot.offset, p.cache.page)),
                    scale);
}

inline WriteCall call_of(const Params& p) {
  const bool wide =
      cuda::is_wide(p.kv, p.kv_stride * 2) && cuda::is_wide(p.rope_part, p.rope_stride * 2);
  return {p, wide, cuda::is_wide(p.norm)};
}

}  // namespace winnow::internal::write::sm90
