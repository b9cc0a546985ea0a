// write on the device: a warp per token holds its row in registers, 16 B a lane and piece, through
// norm, RoPE and Hadamard (cuda/prologue.h); the maximum of a tile by shuffles. Bytes are the
// budget: 1,152 in and 656 out per token of V3.2.
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

// Token t, by a warp; those behind the last are none. Slot, position, row and weights are asked for
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

// Whether write_plain() or write_plain_keys() takes the call: aligned rows, weights and angles;
// latents have RMS without a bias and RoPE over pairs in place last, keys LayerNorm.
inline bool is_plain(const WriteCall& call) {
  const Params& p = call.p;
  if (!call.wide || !p.prologue || p.rope.table == nullptr || !cuda::is_wide(p.rope)) return false;
  if (p.cache.format == CacheFormat::kIndexKeys)
    return p.norm.kind == NormKind::kLayer && p.norm.weight != nullptr && call.norm_wide;
  return cuda::is_plain(p.norm) && !p.rope.half && !p.rope.first;
}

// write_token() for a plain call of latents, in fewer registers and instructions. kMany: weights
// come from L1 when they are due; else they are asked for with the row.
template <class R, bool kMany>
__device__ __forceinline__ void write_plain(const WriteCall& call, int64_t t, int lane) {
  constexpr int kPieces = ceil_div(R::kDim, cuda::kWarpValues);
  constexpr int kNormedPieces = kNormed<R> / cuda::kWarpValues;
  constexpr int kTurned = R::kDim - kRopeDim;  // where RoPE begins
  constexpr int kTurnedPiece = kTurned / cuda::kWarpValues;
  constexpr int kTurnedLane = kTurned % cuda::kWarpValues / cuda::kPiece;
  const Params& p = call.p;
  if (t >= p.tokens) return;
  const int64_t position = p.positions[t * p.position_stride];
  const int64_t slot = p.slots[t * p.slot_stride];
  cuda::Held<kPieces> row;
  load_values<R>(p, t, true, lane, row);
  const float* weights = p.norm.weight + lane * cuda::kPiece;
  float weight[kNormedPieces][cuda::kPiece];
  const auto load_weights = [&] {
#pragma unroll
    for (int c = 0; c < kNormedPieces; ++c)
      cuda::load_floats(weights + c * cuda::kWarpValues, 0, cuda::kPiece, true, weight[c]);
  };
  if (!kMany) load_weights();
  if (!in_table(p.rope, position) || slot < 0 || slot >= p.cache.pages * p.cache.page) return;
  const bool turns = lane >= kTurnedLane && lane < kTurnedLane + cuda::kRopeLanes;
  float cosine[cuda::kPiece / 2], sine[cuda::kPiece / 2];
  if (turns)
    cuda::load_turns<true>(p.rope, position, (lane - kTurnedLane) * (cuda::kPiece / 2), cosine,
                           sine);
  float squares[kNormedPieces];
#pragma unroll
  for (int c = 0; c < kNormedPieces; ++c) {
    float v[cuda::kPiece];
    row.values(c, v);
    squares[c] = cuda::add_squares(0, v);
  }
  const float sum = cuda::warp_sum(__fadd_rn(squares[0], squares[1]));
  const float inverse = cuda::inverse_of(p.norm, sum, kNormed<R>);
  if (kMany) load_weights();
#pragma unroll
  for (int c = 0; c < kNormedPieces; ++c)
    row.pieces[c] = cuda::normed(inverse, row.pieces[c], weight[c]);
  if (turns)
    row.pieces[kTurnedPiece] =
        cuda::turned_pairs(row.pieces[kTurnedPiece], p.rope.inverse, cosine, sine);
  const cuda::Spot spot = cuda::spot_of(p.cache, slot);
  cuda::store_record<R>(p.quantizer, row, spot.page, spot.offset, p.cache.page, lane);
}

// write_token() for a plain call of index keys: a warp takes tokens 2 * pair and the next one, 16
// lanes each.
__device__ __forceinline__ void write_plain_keys(const WriteCall& call, int64_t pair, int lane) {
  using R = IndexKeys;
  constexpr int kLanes = R::kDim / cuda::kPiece;
  const Params& p = call.p;
  const int64_t t = 2 * pair + lane / kLanes;
  const int at = lane % kLanes * cuda::kPiece;
  int64_t position = -1, slot = -1;
  uint4 row{};
  if (t < p.tokens) {
    position = p.positions[t * p.position_stride];
    slot = p.slots[t * p.slot_stride];
    row = *reinterpret_cast<const uint4*>(p.kv + t * p.kv_stride + at);
  }
  float weight[cuda::kPiece], bias[cuda::kPiece] = {};
  cuda::load_floats(p.norm.weight, at, R::kDim, true, weight);
  if (p.norm.bias != nullptr) cuda::load_floats(p.norm.bias, at, R::kDim, true, bias);
  const bool inside = in_table(p.rope, position);
  const bool stored = inside && slot >= 0 && slot < p.cache.pages * p.cache.page;
  const cuda::Turn turn =
      cuda::turn_of<true>(p.rope, inside ? position : 0, lane % cuda::kRopeLanes);
  // The zero is what a warp's other half adds in write_token().
  const auto sum = [](float x) {
    x = __fadd_rn(x, 0.0f);
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, d));
    return x;
  };
  float v[cuda::kPiece];
  cuda::unpack(row, v);
  cuda::NormFactors f;
  f.mean = cuda::mean_of(sum(cuda::add_values(0, v)), R::kDim);
  f.inverse = cuda::inverse_of(p.norm, sum(cuda::add_squares(0, v, f.mean, cuda::kPiece)), R::kDim);
  row = cuda::normed(f, v, weight, p.norm.bias != nullptr, bias);
  const int begin = p.rope.first ? 0 : R::kDim - kRopeDim;
  const uint4 turned = cuda::rotated(p.rope.half, turn, row);
  row = cuda::either(at >= begin && at < begin + kRopeDim, turned, row);
  if (p.hadamard) row = cuda::hadamard(row, lane);
  const float scale = cuda::tile_scale<kLanes>(p.quantizer, cuda::largest(row));
  if (!stored) return;
  const cuda::Spot spot = cuda::spot_of(p.cache, slot);
  const uint2 codes = cuda::codes_of(p.quantizer, scale, row);
  auto* to = reinterpret_cast<uint32_t*>(spot.page + R::row(spot.offset, p.cache.page) + at);
  to[0] = codes.x;  // pages are aligned to 4 B only
  to[1] = codes.y;
  if (at == 0)
    core::put_scale(reinterpret_cast<float*>(spot.page + R::scales(spot.offset, p.cache.page)),
                    scale);
}

inline WriteCall call_of(const Params& p) {
  const bool wide =
      cuda::is_wide(p.kv, p.kv_stride * 2) && cuda::is_wide(p.rope_part, p.rope_stride * 2);
  return {p, wide, cuda::is_wide(p.norm)};
}

}  // namespace winnow::internal::write::sm90
