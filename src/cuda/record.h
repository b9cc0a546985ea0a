// e4m3 codes and records of bf16 rows that lie in the registers of a warp (core/quantizer.h
// specifies the codes, model/ the records).
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "core/quantizer.h"
#include "cuda/turn.h"

namespace winnow::internal::cuda {

using core::Quantizer;

// to_e4m3(scaled) by the conversion unit. Arithmetic drops a NaN's sign, so it comes from x itself.
__device__ __forceinline__ uint8_t quantized(float x, float scaled) {
  if (isnan(x)) return signbit(x) ? 0xff : 0x7f;
  return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float magnitude(float x) {
  return isnan(x) ? 0.0f : fminf(fabsf(x), FLT_MAX);
}

// The larger of two pairs of bf16 magnitudes, both halves at once, with any signs. The maximum
// takes no NaN.
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// The larger pair of a piece: NaN only where all values are.
__device__ __forceinline__ uint32_t largest_pair(const uint4& piece) {
  return larger_pair(larger_pair(piece.x, piece.y), larger_pair(piece.z, piece.w));
}
// The largest magnitude of the bf16 values in `pairs`.
template <int kPairs>
__device__ __forceinline__ float largest(const uint32_t (&pairs)[kPairs]) {
  uint32_t both = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) both = larger_pair(both, pairs[i]);
  return fmaxf(fabsf(__uint_as_float(both << 16)), fabsf(__uint_as_float(both & 0xffff0000u)));
}
__device__ __forceinline__ float largest(const uint4& piece) {
  return largest<4>({piece.x, piece.y, piece.z, piece.w});
}

// core::scale_of() for the largest magnitude of bf16 values. A division by 448 takes one
// correction, above 2^-80.
__device__ __forceinline__ float scale_of_bf16(const Quantizer& q, float amax) {
  const float floored = q.floor_amax ? fmaxf(amax, q.floor) : amax;
  if (q.power_of_two) {
    // By the exponents alone, since 448 is 1.75 * 2^8: no bf16 magnitude and no floor comes so
    // close to a power of two times that, that the rounding of the quotient would matter.
    constexpr int kUnit = 1 << 23, kAbove = 0x600000;  // of the exponent; 0.75 in the mantissa
    const auto up = [](float x, int by) {
      return (__float_as_int(x) + by) & static_cast<int>(0x7f800000u);
    };
    const int own = up(floored, kUnit - 1 - kAbove) - 8 * kUnit;
    const int least = q.floor_amax ? own : up(q.floor, kUnit - 1);
    return __int_as_float(own > least ? own : least);
  }
  const bool small = floored < 0x1p-80f;  // ... or is brought there
  const float nearer = small ? __fmul_rn(floored, 0x1p64f) : floored;
  float s = core::corrected_quotient(nearer, kE4m3Max, 1 / kE4m3Max);
  if (small) s = __fmul_rn(s, 0x1p-64f);
  return q.floor_amax ? s : fmaxf(s, q.floor);
}

// The scale of a tile that lies in `kLanes` neighbours, by all lanes of a warp, each with the
// largest magnitude of its own. An infinity counts as the largest finite float.
template <int kLanes>
__device__ __forceinline__ float tile_scale(const Quantizer& q, float amax) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
  return scale_of_bf16(q, fminf(amax, FLT_MAX));
}

// The codes of four values, given their quotients; signs, of zeros and NaNs too, are those of the
// bf16 pairs that the values came from.
__device__ __forceinline__ uint32_t codes_of(const float* scaled, uint32_t low, uint32_t high) {
  uint32_t codes;
  asm("{\n.reg .b16 x, y;\ncvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\nmov.b32 %0, {x, y};\n}"
      : "=r"(codes)
      : "f"(scaled[0]), "f"(scaled[1]), "f"(scaled[2]), "f"(scaled[3]));
  const uint32_t signs = __byte_perm(low, high, 0x7531);  // the upper bytes of four bf16
  // (codes & mask) | (signs & ~mask), which the compiler would spread over two instructions.
  asm("lop3.b32 %0, %0, %1, 0x7f7f7f7f, 0xe4;" : "+r"(codes) : "r"(signs));
  return codes;
}

// How values are divided by a scale: by a product, exact where the scale is a power of two, else
// by core::TwoPartInverse, which gives the quotient itself. No real tile's scale is so far from 1
// that both must be brought nearer first.
struct ScaleInverse {
  float high, low;
  float nearer;  // 1, or the power of two that values are multiplied by
};
__device__ __forceinline__ ScaleInverse scale_inverse(const Quantizer& q, float scale) {
  // Between 2^-22 and 2^120: the inverse has the opposite exponent.
  if (q.power_of_two) return {__uint_as_float((254u << 23) - __float_as_uint(scale)), 0, 1};
  const float nearer = scale < 0x1p-80f ? 0x1p64f : scale > 0x1p100f ? 0x1p-64f : 1.0f;
  scale = __fmul_rn(scale, nearer);
  float near;  // the hardware's inverse needs one correction, and here no branch
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
  const float high = __fmaf_rn(near, -__fmaf_rn(near, scale, -1.0f), near);
  return {high, __fmul_rn(__fmaf_rn(-high, scale, 1.0f), high), nearer};
}

__device__ __forceinline__ uint32_t multiplied_pair(uint32_t pair, float power_of_two) {
  const uint32_t both = __byte_perm(__float_as_uint(power_of_two), 0, 0x3232);
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(both));
  return out;
}
// Both values brought nearer to 1. An infinity becomes the largest finite value, which has the same
// code.
__device__ __forceinline__ uint32_t nearer_pair(uint32_t pair, float power_of_two) {
  uint32_t finite;
  asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(finite) : "r"(pair), "r"(0x7f7f7f7fu));
  return multiplied_pair(finite, power_of_two);
}

// The codes of bf16 values, two a word of `pairs`.
template <int kPairs>
__device__ __forceinline__ void codes_of(const Quantizer& q, const ScaleInverse& by,
                                         const uint32_t (&pairs)[kPairs],
                                         uint32_t (&codes)[kPairs / 2]) {
  float v[2 * kPairs];
  if (q.power_of_two) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) unpack_pair(multiplied_pair(pairs[i], by.high), v + 2 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      unpack_pair(by.nearer == 1 ? pairs[i] : nearer_pair(pairs[i], by.nearer), v + 2 * i);
#pragma unroll
    for (float& x : v) x = __fmaf_rn(x, by.high, __fmul_rn(x, by.low));
  }
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i)
    codes[i] = codes_of(v + 4 * i, pairs[2 * i], pairs[2 * i + 1]);
}
__device__ __forceinline__ uint2 codes_of(const Quantizer& q, const ScaleInverse& by,
                                          const uint4& piece) {
  uint32_t codes[2];
  codes_of<4>(q, by, {piece.x, piece.y, piece.z, piece.w}, codes);
  return {codes[0], codes[1]};
}

// Where a slot inside a cache lies.
struct Spot {
  std::byte* page;
  int64_t offset;
};
// kEvenPages: their size is a power of two.
template <bool kEvenPages = false>
__device__ __forceinline__ Spot spot_of(const core::Pages& cache, int64_t slot) {
  const auto size = static_cast<uint32_t>(cache.page);
  int64_t page;
  // A division in 64 bits takes several hundred cycles.
  if (kEvenPages || (size & (size - 1)) == 0) page = slot >> (31 - __clz(static_cast<int>(size)));
  else if (slot <= UINT32_MAX) page = static_cast<uint32_t>(slot) / size;
  else page = slot / size;
  return {cache.data + page * cache.stride, slot - page * size};
}

// 8 codes, at once or one by one.
__device__ __forceinline__ void store_codes(uint8_t* to, bool wide, const uint2& codes) {
  if (wide) {
    store8(to, codes);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    to[i] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
}

// The quantiser, with what the record's form says about it: a scale of one byte is a power of two.
template <class R>
__device__ __forceinline__ Quantizer quantizer_for(Quantizer q) {
  if (sizeof(typename R::Scale) == 1) q.power_of_two = true;
  return q;
}

// Writes codes and scales of rows that share a warp, kLanes lanes each: piece c of a lane begins at
// value (c * kLanes + lane) * kPiece; RoPE's values behind R::kNope are left out. A lane finds the
// scale of one tile: the maxima of two pieces share a word, and half of the lanes reduce one word,
// half the other. `stored`: rows that have a place.
template <class R, int kLanes, int kPieces>
__device__ __forceinline__ void store_tiles(const Quantizer& quantizer, const uint4 (&row)[kPieces],
                                            bool stored, const Spot& spot, int64_t page_size,
                                            int lane) {
  static_assert(kPieces == 2 || kPieces == 4);
  constexpr int kTileLanes = R::kTile / kPiece;
  constexpr int kPairs = kPieces / 2;
  constexpr int kPairBit = kPairs == 2 ? kTileLanes / 2 : 0;               // of a lane: which word
  constexpr int kHalfBit = kPairs == 2 ? kTileLanes / 4 : kTileLanes / 2;  // ... and which half
  const Quantizer q = quantizer_for<R>(quantizer);
  uint32_t most[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const uint32_t first = largest_pair(row[2 * j]);
    const uint32_t second = largest_pair(row[2 * j + 1]);
    most[j] = larger_pair(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
  }
  uint32_t own = most[0];
  if constexpr (kPairs == 2) {
    const bool upper = lane & kPairBit;
    own = upper ? most[1] : most[0];
    own = larger_pair(own, __shfl_xor_sync(~0u, upper ? most[0] : most[1], kPairBit));
  }
#pragma unroll
  for (int d = kTileLanes / (2 * kPairs); d > 0; d /= 2)
    own = larger_pair(own, __shfl_xor_sync(~0u, own, d));
  const bool second = lane & kHalfBit;
  const float amax = fabsf(__uint_as_float(second ? own & 0xffff0000u : own << 16));
  const float scale = scale_of_bf16(q, fminf(fmaxf(amax, 0.0f), FLT_MAX));  // not of NaNs alone
  const ScaleInverse inverse = scale_inverse(q, scale);
  // Every row has this scale in one lane of kHalfBit.
  std::byte* scales = spot.page + R::scales(spot.offset, page_size);
  if (stored && lane % kHalfBit == 0) {
    const int piece = 2 * ((lane & kPairBit) != 0) + second;
    const int tile = piece * (kLanes / kTileLanes) + lane / kTileLanes;
    auto* to = reinterpret_cast<typename R::Scale*>(scales) + tile;
    if (tile < R::kTiles) core::put_scale(to, scale);
    else *to = {};  // bytes after the last scale are zero
  }
  std::byte* to = spot.page + R::row(spot.offset, page_size) + lane * kPiece;
  asm volatile("" : "+l"(to));  // found once
  const auto store_codes = [&](auto power_of_two) {
    constexpr Quantizer kOf{0, false, decltype(power_of_two)::value};
    const bool near = kOf.power_of_two || __all_sync(~0u, inverse.nearer == 1);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int holder = c / 2 * kPairBit + c % 2 * kHalfBit;  // of the piece's tile
      const auto of_tile = [&](float x) { return __shfl_sync(~0u, x, holder, kTileLanes); };
      ScaleInverse by{of_tile(inverse.high), 0, 1};
      if (!kOf.power_of_two) by.low = of_tile(inverse.low);
      if (!near) by.nearer = of_tile(inverse.nearer);
      uint32_t codes[2];
      codes_of<4>(kOf, by, {row[c].x, row[c].y, row[c].z, row[c].w}, codes);
      if (stored && (c * kLanes + lane) * kPiece < R::kNope)
        store8(to + c * kLanes * kPiece, {codes[0], codes[1]});
    }
  };
  if (q.power_of_two) store_codes(std::true_type());
  else store_codes(std::false_type());
}

// Writes the record of a row, by all lanes of a warp: R::kDim values in `row`.
template <class R, int kPieces>
__device__ __forceinline__ void store_record(const Quantizer& q, const Held<kPieces>& row,
                                             std::byte* page, int64_t offset, int64_t page_size,
                                             int lane) {
  if constexpr (R::kFormat == CacheFormat::kIndexKeys) {
    const float scale = tile_scale<R::kTile / kPiece>(q, largest(row.pieces[0]));
    const int at = piece_at(0, lane);
    if (at >= R::kDim) return;
    const uint2 codes = codes_of(q, scale_inverse(q, scale), row.pieces[0]);
    auto* to = reinterpret_cast<uint32_t*>(page + R::row(offset, page_size) + at);
    to[0] = codes.x;  // pages are aligned to 4 B only
    to[1] = codes.y;
    if (at == 0)
      core::put_scale(reinterpret_cast<float*>(page + R::scales(offset, page_size)), scale);
  } else if constexpr (R::kQuantized) {
    const uint4 tiles[2] = {row.pieces[0], row.pieces[1]};
    store_tiles<R, 32>(q, tiles, true, {page, offset}, page_size, lane);
    constexpr int kLast = R::kNope / kWarpValues;  // the piece that RoPE turns
    const int in = piece_at(kLast, lane) - R::kNope;
    if (in >= 0 && in < R::kRope)
      store16(page + R::rope(offset, page_size) + in * 2, row.pieces[kLast]);
  } else {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int at = piece_at(c, lane);
      if (at < R::kDim) store16(page + R::row(offset, page_size) + at * 2, row.pieces[c]);
    }
  }
}

}  // namespace winnow::internal::cuda
