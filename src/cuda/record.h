// e4m3 codes and records of bf16 rows that lie in the registers of a warp (core/quantizer.h
// specifies the codes, model/ the records).
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "core/quantizer.h"
#include "cuda/prologue.h"

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

// The larger of amax and a piece's magnitudes. The maximum takes no NaN.
__device__ __forceinline__ float largest(float amax, const uint4& piece) {
  float v[kPiece];
  unpack(piece, v);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) amax = fmaxf(amax, fabsf(v[i]));
  return amax;
}

// The scale of a tile that lies in `kLanes` neighbours, by all lanes of a warp, each with the
// largest magnitude of its own. An infinity counts as the largest finite float.
template <int kLanes>
__device__ __forceinline__ float tile_scale(const Quantizer& q, float amax) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
  return core::scale_of(q, fminf(amax, FLT_MAX));
}

// x / scale, rounded once, for scales far from the ends of fp32's range; `inverse` is that of the
// scale. The quotient is corrected twice by what it leaves over; its sign is x's, for zeros too.
__device__ __forceinline__ float divided(float x, float scale, float inverse) {
  float quotient = __fmul_rn(x, inverse);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient);
  return copysignf(quotient, x);
}

// The piece's codes. A division by a power of two is an exact product.
__device__ __forceinline__ uint2 codes_of(const Quantizer& q, float scale, const uint4& piece) {
  float v[kPiece], scaled[kPiece];
  unpack(piece, v);
  if (q.power_of_two) {  // between 2^-22 and 2^120: the inverse has the opposite exponent
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
    for (int i = 0; i < kPiece; ++i) scaled[i] = __fmul_rn(v[i], inverse);
  } else if (scale >= 0x1p-100f && scale <= 0x1p100f) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) scaled[i] = divided(v[i], scale, inverse);
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) scaled[i] = __fdiv_rn(v[i], scale);
  }
  uint32_t words[2] = {};
  bool any_nan = false;
#pragma unroll
  for (int i = 0; i < kPiece; i += 2) {
    const __nv_fp8x2_storage_t pair =
        __nv_cvt_float2_to_fp8x2({scaled[i], scaled[i + 1]}, __NV_SATFINITE, __NV_E4M3);
    words[i / 4] |= static_cast<uint32_t>(pair) << (i % 4 * 8);
    any_nan = any_nan || isnan(v[i]) || isnan(v[i + 1]);
  }
  if (any_nan) {  // whose signs the conversion drops
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (isnan(v[i])) {
        const uint32_t code = signbit(v[i]) ? 0xff : 0x7f;
        words[i / 4] = (words[i / 4] & ~(0xffu << (i % 4 * 8))) | code << (i % 4 * 8);
      }
  }
  return {words[0], words[1]};
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
      float scale = 0;
      if (c * kWarpValues < R::kNope) scale = tile_scale<R::kTile / kPiece>(q, largest(0, piece));
      if (at < R::kNope) {
        const uint2 codes = codes_of(q, scale, piece);
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
