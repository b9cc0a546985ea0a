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

inline WriteCall call_of(const Params& p) {
  const bool wide =
      cuda::is_wide(p.kv, p.kv_stride * 2) && cuda::is_wide(p.rope_part, p.rope_stride * 2);
  return {p, wide, cuda::is_wide(p.norm)};
}

}  // namespace winnow::internal::write::sm90
