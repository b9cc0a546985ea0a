// RoPE and Hadamard of bf16 rows that lie in the registers of a warp (core/prologue.h specifies
// them), behind their norm (cuda/prologue.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/prologue.h"

namespace winnow::internal::cuda {

// x / by, which is a shift where `by` is a power of two: a division takes 25 instructions, one
// after the other, before a thread knows what it has to load.
__device__ __forceinline__ uint32_t divided(uint32_t x, uint32_t by) {
  if ((by & (by - 1)) == 0) return x >> (31 - __clz(static_cast<int>(by)));
  return x / by;
}

// How the values of one of the 8 rotated pieces turn: own * cosine + partner * sine, the sine with
// the sign that the value's place in its pair and the direction give it.
struct Turn {
  float cosine[kPiece], sine[kPiece];
};

// Cosines and sines of kCount neighbouring pairs from `first` on. kWide: is_wide(r).
template <bool kWide = false, int kCount>
__device__ __forceinline__ void load_turns(const RopeParams& r, int64_t position, int first,
                                           float (&cosine)[kCount], float (&sine)[kCount]) {
  const float* cosines = r.table + position * r.position_stride + first * r.pair_stride;
  const float* sines = cosines + r.sine_stride;
  bool wide = kWide;
  if constexpr (!kWide) {
    const auto places = reinterpret_cast<uintptr_t>(cosines) | reinterpret_cast<uintptr_t>(sines);
    wide = r.pair_stride == 1 && places % 16 == 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    if (wide) {
      const float4 c = *reinterpret_cast<const float4*>(cosines + i);
      const float4 s = *reinterpret_cast<const float4*>(sines + i);
      cosine[i] = c.x, cosine[i + 1] = c.y, cosine[i + 2] = c.z, cosine[i + 3] = c.w;
      sine[i] = s.x, sine[i + 1] = s.y, sine[i + 2] = s.z, sine[i + 3] = s.w;
      continue;
    }
#pragma unroll
    for (int k = i; k < i + 4; ++k) {
      cosine[k] = cosines[k * r.pair_stride];
      sine[k] = sines[k * r.pair_stride];
    }
  }
}

// Of piece `part` (0 to 7), at a position inside the table.
template <bool kWide = false>
__device__ __forceinline__ Turn turn_of(const RopeParams& r, int64_t position, int part) {
  Turn t;
  if (r.half) {
    load_turns<kWide>(r, position, part % (kRopeLanes / 2) * kPiece, t.cosine, t.sine);
    const bool second = part >= kRopeLanes / 2;
#pragma unroll
    for (float& s : t.sine) s = second != r.inverse ? s : -s;
    return t;
  }
  float cosine[kPiece / 2], sine[kPiece / 2];
  load_turns<kWide>(r, position, part * (kPiece / 2), cosine, sine);
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    t.cosine[2 * i] = t.cosine[2 * i + 1] = cosine[i];
    t.sine[2 * i] = r.inverse ? sine[i] : -sine[i];
    t.sine[2 * i + 1] = -t.sine[2 * i];
  }
  return t;
}

// By all lanes of a warp; `half` pairs are four lanes apart.
__device__ __forceinline__ uint4 rotated(bool half, const Turn& t, const uint4& piece) {
  const auto far = [](uint32_t pair) { return __shfl_xor_sync(~0u, pair, kRopeLanes / 2); };
  float own[kPiece], partner[kPiece];
  unpack(piece, own);
  if (half) {
    unpack({far(piece.x), far(piece.y), far(piece.z), far(piece.w)}, partner);
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) partner[i] = own[i ^ 1];
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    own[i] = __fadd_rn(__fmul_rn(own[i], t.cosine[i]), __fmul_rn(partner[i], t.sine[i]));
  return packed(own);
}

// RoPE of 8 values by the angles of their four pairs, which lie in place.
__device__ __forceinline__ uint4 turned_pairs(const uint4& piece, bool inverse,
                                              const float (&cosine)[kPiece / 2],
                                              const float (&sine)[kPiece / 2]) {
  float v[kPiece];
  unpack(piece, v);
#pragma unroll
  for (int k = 0; k < kPiece / 2; ++k) {
    const float s = inverse ? -sine[k] : sine[k];
    const float first = v[2 * k];
    const float second = v[2 * k + 1];
    v[2 * k] = __fsub_rn(__fmul_rn(first, cosine[k]), __fmul_rn(second, s));
    v[2 * k + 1] = __fadd_rn(__fmul_rn(second, cosine[k]), __fmul_rn(first, s));
  }
  return packed(v);
}

// Turns those of a held row's values that RoPE turns, by all lanes of a warp: one piece of 8 lanes,
// since rows are whole groups of 64 values.
template <int kPieces>
__device__ __forceinline__ void rotate_held(const RopeParams& r, const Turn& t, int64_t width,
                                            Held<kPieces>& row, int lane) {
  const int rope = static_cast<int>(core::rope_begin(r, width));
  // By values: an index that is known at run time only would move the row out of the registers.
  uint4 piece = row.pieces[0];
#pragma unroll
  for (int c = 1; c < kPieces; ++c) piece = either(rope / kWarpValues == c, row.pieces[c], piece);
  piece = rotated(r.half, t, piece);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = piece_at(c, lane);
    row.pieces[c] = either(at >= rope && at < rope + kRopeDim, piece, row.pieces[c]);
  }
}

// Sums and differences of a Hadamard product inside a piece, then across `kLanes` neighbours, by
// all lanes of a warp.
template <int kLanes>
__device__ __forceinline__ void hadamard_steps(float (&v)[kPiece], int lane) {
#pragma unroll
  for (int step = 1; step < kPiece; step *= 2)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (i & step) continue;
      const float low = v[i];
      const float high = v[i + step];
      v[i] = __fadd_rn(low, high);
      v[i + step] = __fsub_rn(low, high);
    }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const float other = __shfl_xor_sync(~0u, v[i], step);
      v[i] = lane & step ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
    }
}
inline constexpr float kHadamardFactor = 0.08838834764831845f;  // 128^-1/2

// 128 values in 16 lanes.
__device__ __forceinline__ uint4 hadamard(const uint4& piece, int lane) {
  float v[kPiece];
  unpack(piece, v);
  hadamard_steps<16>(v, lane);
#pragma unroll
  for (float& x : v) x = __fmul_rn(x, kHadamardFactor);
  return packed(v);
}

// 128 values in 8 lanes, of which each has a piece of either half: the same sums.
__device__ __forceinline__ void hadamard(uint4& first, uint4& second, int lane) {
  float low[kPiece], high[kPiece];
  unpack(first, low);
  unpack(second, high);
  hadamard_steps<8>(low, lane);
  hadamard_steps<8>(high, lane);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float sum = __fadd_rn(low[i], high[i]);
    high[i] = __fmul_rn(__fsub_rn(low[i], high[i]), kHadamardFactor);
    low[i] = __fmul_rn(sum, kHadamardFactor);
  }
  first = packed(low);
  second = packed(high);
}

}  // namespace winnow::internal::cuda
