// e4m3 codes and records of bf16 rows that lie in the registers of a warp (core/quantizer.h
// specifies the codes, model/ the records).
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

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
  return (codes & 0x7f7f7f7fu) | (signs & 0x80808080u);
}

// The codes of four bf16 values whose tile's scale is far from 1: both are brought nearer; an
// infinity stays one. Out of line, because no real tile has one.
__device__ __noinline__ inline uint32_t far_codes_of(float scale, uint32_t low, uint32_t high) {
  const float by = scale < 1 ? 0x1p64f : 0x1p-64f;
  const float nearer = __fmul_rn(scale, by);
  const float inverse = __frcp_rn(nearer);
  float v[4] = {__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u)};
#pragma unroll
  for (float& x : v) x = isinf(x) ? x : core::corrected_quotient(__fmul_rn(x, by), nearer, inverse);
  return codes_of(v, low, high);
}

// The codes of bf16 values, two a word of `pairs`. A division by a power of two is an exact
// product.
template <int kPairs>
__device__ __forceinline__ void codes_of(const Quantizer& q, float scale,
                                         const uint32_t (&pairs)[kPairs],
                                         uint32_t (&codes)[kPairs / 2]) {
  float v[2 * kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    v[2 * i] = __uint_as_float(pairs[i] << 16);
    v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
  if (q.power_of_two) {  // between 2^-22 and 2^120: the inverse has the opposite exponent
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
    for (float& x : v) x = __fmul_rn(x, inverse);
  } else if (scale >= 0x1p-80f && scale <= 0x1p100f) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (float& x : v) x = core::corrected_quotient(x, scale, inverse);
  } else {
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i)
      codes[i] = far_codes_of(scale, pairs[2 * i], pairs[2 * i + 1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i)
    codes[i] = codes_of(v + 4 * i, pairs[2 * i], pairs[2 * i + 1]);
}
__device__ __forceinline__ uint2 codes_of(const Quantizer& q, float scale, const uint4& piece) {
  uint32_t codes[2];
  codes_of<4>(q, scale, {piece.x, piece.y, piece.z, piece.w}, codes);
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

// Writes the record of a row, by all lanes of a warp: R::kDim values in `row`.
template <class R, int kPieces>
__device__ __forceinline__ void store_record(const Quantizer& q, const Held<kPieces>& row,
                                             std::byte* page, int64_t offset, int64_t page_size,
                                             int lane) {
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = piece_at(c, lane);
    const uint4 piece = row.pieces[c];
    if constexpr (R::kQuantized) {
      const Quantizer of = quantizer_for<R>(q);
      float scale = 0;
      if (c * kWarpValues < R::kNope) scale = tile_scale<R::kTile / kPiece>(of, largest(piece));
      if (at < R::kNope) {
        const uint2 codes = codes_of(of, scale, piece);
        auto* to = reinterpret_cast<uint32_t*>(page + R::row(offset, page_size) + at);
        if constexpr (R::kFormat == CacheFormat::kIndexKeys) {  // pages are aligned to 4 B only
          to[0] = codes.x;
          to[1] = codes.y;
        } else {
          store8(to, codes);
        }
      }
      if (at < R::kNope && at % R::kTile == 0) {
        std::byte* scales = page + R::scales(offset, page_size);
        core::put_scale(reinterpret_cast<typename R::Scale*>(scales) + at / R::kTile, scale);
      }
      if constexpr (R::kRope > 0)
        if (at >= R::kNope && at < R::kDim)
          store16(page + R::rope(offset, page_size) + (at - R::kNope) * 2, piece);
      if constexpr (R::kScaleBytes > R::kTiles * static_cast<int>(sizeof(typename R::Scale)))
        if (at == 0) {  // bytes behind the last scale are zero
          std::byte* scales = page + R::scales(offset, page_size);
          for (int b = R::kTiles * sizeof(typename R::Scale); b < R::kScaleBytes; ++b)
            scales[b] = std::byte{0};
        }
    } else {
      if (at < R::kDim) store16(page + R::row(offset, page_size) + at * 2, piece);
    }
  }
}

}  // namespace winnow::internal::cuda
