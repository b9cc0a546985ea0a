// Norm of bf16 rows that lie in the registers of a warp (core/prologue.h specifies it); turn.h has
// RoPE and Hadamard.
//
// A row is cut into pieces of 8 values, 16 B: piece g belongs to lane g % 32, as its piece g / 32.
// Sums run over a lane's pieces, then over the lanes in a butterfly: the order depends on the width
// alone, and no product is fused with a sum unless it is spelt so, because calls that
// join several steps must give the bits of the single ones.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/arithmetic.h"
#include "core/prologue.h"
#include "cuda/hopper.h"

namespace winnow::internal::cuda {

using core::NormParams;
using core::RopeParams;

inline constexpr int kPiece = 8;                      // values of a piece
inline constexpr int kRopeLanes = kRopeDim / kPiece;  // lanes that hold the rotated values
inline constexpr int kWarpValues = 32 * kPiece;       // values of a warp with a piece a lane

// Where piece c of a lane begins.
__device__ __forceinline__ int piece_at(int c, int lane) { return (c * 32 + lane) * kPiece; }

__device__ __forceinline__ void unpack_pair(uint32_t pair, float* v) {
  v[0] = __uint_as_float(pair << 16);
  v[1] = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void unpack(const uint4& piece, float (&v)[kPiece]) {
  const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack_pair(pairs[i], v + 2 * i);
}

// Rounds to bf16.
__device__ __forceinline__ uint4 packed(const float (&v)[kPiece]) {
  return {pack<true>(v[0], v[1]), pack<true>(v[2], v[3]), pack<true>(v[4], v[5]),
          pack<true>(v[6], v[7])};
}

// Whether rows may be read and written 16 B at a time.
inline bool is_wide(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}
inline bool is_wide(const NormParams& n) { return is_wide(n.weight, 0) && is_wide(n.bias, 0); }
inline bool is_wide(const RopeParams& r) {
  return is_wide(r.table, r.position_stride * 4) && r.sine_stride % 4 == 0 && r.pair_stride == 1;
}
// What most norms of latents are.
inline bool is_plain(const NormParams& n) {
  return n.kind == NormKind::kRms && n.weight != nullptr && n.bias == nullptr && is_wide(n);
}

// Kernels for usual calls find rows by products of 32 bits: an eighth of their instructions would
// be those of 64.
inline bool fits_product(int64_t number) { return number >= 0 && number <= INT32_MAX; }
// data[index * stride], both of which fit.
template <class T>
__device__ __forceinline__ T* at_product(T* data, uint32_t index, int64_t stride) {
  return data + uint64_t{index} * static_cast<uint32_t>(stride);
}

// Values [at, at + 8) of a row, zeros behind its end. `wide`: the row is aligned and its width a
// multiple of 8.
__device__ __forceinline__ uint4 load_piece(const bf16* row, int64_t at, int64_t width, bool wide) {
  if (at >= width) return {};
  if (wide) return *reinterpret_cast<const uint4*>(row + at);
  uint32_t pairs[4] = {};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (at + i < width) pairs[i / 2] |= static_cast<uint32_t>(row[at + i].bits) << (i % 2 * 16);
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// What is requested here, in this order: the compiler would load it after a wait for something
// else.
__device__ __forceinline__ uint4 load16_now(const void* from) {
  uint4 piece;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(__cvta_generic_to_global(from)));
  return piece;
}
__device__ __forceinline__ int32_t load_now(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}
__device__ __forceinline__ int64_t load_now(const int64_t* from) {
  int64_t value;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(from)));
  return value;
}

// The compiler may cut an assignment of 16 or 8 B into words; these stay whole.
__device__ __forceinline__ void store16(void* to, const uint4& piece) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w)
               : "memory");
}
__device__ __forceinline__ void store8(void* to, const uint2& codes) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(codes.x),
               "r"(codes.y)
               : "memory");
}

__device__ __forceinline__ void store_piece(bf16* row, int64_t at, int64_t width, bool wide,
                                            const uint4& piece) {
  if (at >= width) return;
  if (wide) {
    store16(row + at, piece);
    return;
  }
  const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (at + i < width) row[at + i] = {static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16))};
}

// Weights or biases of a piece.
__device__ __forceinline__ void load_floats(const float* row, int64_t at, int64_t width, bool wide,
                                            float (&v)[kPiece]) {
  if (wide) {
    if (at >= width) {
#pragma unroll
      for (float& x : v) x = 0;
      return;
    }
    const float4 low = *reinterpret_cast<const float4*>(row + at);
    const float4 high = *reinterpret_cast<const float4*>(row + at + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = at + i < width ? row[at + i] : 0.0f;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// A row in a lane's registers.
template <int kPieces>
struct Held {
  uint4 pieces[kPieces];
  __device__ static constexpr int count() { return kPieces; }
  __device__ void values(int c, float (&v)[kPiece]) const { unpack(pieces[c], v); }
};

// A row between memory and a lane's registers.
template <int kPieces>
__device__ __forceinline__ void load_row(const bf16* row, int64_t width, bool wide, int lane,
                                         Held<kPieces>& held) {
  const auto load = [&](bool whole) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      held.pieces[c] = load_piece(row, piece_at(c, lane), width, whole);
  };
  wide ? load(true) : load(false);
}
template <int kPieces>
__device__ __forceinline__ void store_row(bf16* row, int64_t width, bool wide, int lane,
                                          const Held<kPieces>& held) {
  const auto store = [&](bool whole) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      store_piece(row, piece_at(c, lane), width, whole, held.pieces[c]);
  };
  wide ? store(true) : store(false);
}

// A row that is read 16 B at a time, from one address.
template <int kPieces>
__device__ __forceinline__ void load_whole(const bf16* row, int width, int lane,
                                           Held<kPieces>& held) {
  const bf16* from = row + lane * kPiece;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    held.pieces[c] = {};
    if (piece_at(c, lane) < width)
      held.pieces[c] = *reinterpret_cast<const uint4*>(from + c * kWarpValues);
  }
}

// A row of floats, of a step before, in a lane's registers.
template <int kPieces>
struct HeldFloats {
  float pieces[kPieces][kPiece];
  __device__ static constexpr int count() { return kPieces; }
  __device__ void values(int c, float (&v)[kPiece]) const {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v[i] = pieces[c][i];
  }
};

// A row of any width in memory, read once a pass.
struct Streamed {
  const bf16* row;
  int64_t width;
  int lane;
  bool wide;
  __device__ int count() const { return static_cast<int>(core::ceil_div(width, kWarpValues)); }
  __device__ uint4 piece(int64_t c) const {
    return load_piece(row, (c * 32 + lane) * kPiece, width, wide);
  }
  __device__ void values(int64_t c, float (&v)[kPiece]) const { unpack(piece(c), v); }
};

// y = (x - mean) * inverse.
struct NormFactors {
  float mean = 0, inverse = 1;
};

// sum / count, rounded once; a power of two is a product.
__device__ __forceinline__ float mean_of(float sum, float count) {
  const uint32_t bits = __float_as_uint(count);
  if ((bits & 0x7fffffu) == 0) return __fmul_rn(sum, __uint_as_float((254u << 23) - bits));
  return __fdiv_rn(sum, count);
}
__device__ __forceinline__ float inverse_of(const NormParams& n, float squares, float count) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(mean_of(squares, count), n.eps)));
}

// inverse_of() with 1 / count at hand, which is rounded: the bits are the same. Where no number is
// extreme, the quotient takes one correction (by Markstein's theorem), and root and inverse are the
// instructions that the compiler has for them, without two branches in a chain that a call of few
// rows waits for.
__device__ __forceinline__ float inverse_of(float eps, float squares, float count, float of_count) {
  const auto is_usual = [](float x) { return x > 0x1p-80f && x < 0x1p80f; };
  const float near = __fmul_rn(squares, of_count);
  const float mean = __fmaf_rn(__fmaf_rn(-near, count, squares), of_count, near);
  const float x = __fadd_rn(mean, eps);
  if (!is_usual(squares) || !is_usual(x))
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, count), eps)));
  float root, inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  root = __fmul_rn(x, inverse);
  root = __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(inverse, 0.5f), root);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(root));
  return __fmaf_rn(inverse, -__fmaf_rn(inverse, root, -1.0f), inverse);
}

// A lane's sums over its pieces run in four chains, piece c in chain c % 4, which are joined last:
// four warps may share a row, a chain each, and get the same bits.
inline constexpr int kChains = 4;

__device__ __forceinline__ float joined(float a, float b, float c, float d) {
  return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
}
// What a piece adds to its chain: the sum of its values, or of the squares of those that are there,
// less the mean.
__device__ __forceinline__ float add_values(float chain, const float (&v)[kPiece]) {
  return __fadd_rn(chain,
                   __fadd_rn(joined(v[0], v[1], v[2], v[3]), joined(v[4], v[5], v[6], v[7])));
}
__device__ __forceinline__ float add_squares(float chain, const float (&v)[kPiece], float mean,
                                             int64_t there) {
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float centred = i < there ? __fsub_rn(v[i], mean) : 0.0f;
    chain = __fmaf_rn(centred, centred, chain);
  }
  return chain;
}
__device__ __forceinline__ float add_squares(float chain, const float (&v)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; ++i) chain = __fmaf_rn(v[i], v[i], chain);
  return chain;
}

// The sum of a warp over a row, with add(chain, c, values) for every piece.
template <class Row, class Add>
__device__ __forceinline__ float row_sum(const Row& row, Add add) {
  float chains[kChains] = {};
#pragma unroll
  for (int first = 0; first < row.count(); first += kChains)
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      if (first + k >= row.count()) continue;
      float v[kPiece];
      row.values(first + k, v);
      chains[k] = add(chains[k], first + k, v);
    }
  return warp_sum(joined(chains[0], chains[1], chains[2], chains[3]));
}

template <class Row>
__device__ __forceinline__ NormFactors rms_factors(const NormParams& n, const Row& row,
                                                   int64_t width) {
  const float squares =
      row_sum(row, [](float chain, int, const auto& v) { return add_squares(chain, v); });
  return {0, inverse_of(n, squares, static_cast<float>(width))};
}

template <class Row>
__device__ __forceinline__ NormFactors layer_factors(const NormParams& n, const Row& row,
                                                     int64_t width, int lane) {
  const auto count = static_cast<float>(width);
  const float sum =
      row_sum(row, [](float chain, int, const auto& v) { return add_values(chain, v); });
  const float mean = mean_of(sum, count);
  const float squares = row_sum(row, [&](float chain, int c, const auto& v) {
    return add_squares(chain, v, mean, width - (int64_t{c} * 32 + lane) * kPiece);
  });
  return {mean, inverse_of(n, squares, count)};
}

// For a norm of either kind, by all lanes of a warp.
template <class Row>
__device__ __forceinline__ NormFactors norm_factors(const NormParams& n, const Row& row,
                                                    int64_t width, int lane) {
  return n.kind == NormKind::kLayer ? layer_factors(n, row, width, lane)
                                    : rms_factors(n, row, width);
}

// A piece x, normalised and rounded: weights of 1 change no bit, a bias of 0 the sign of a zero.
__device__ __forceinline__ uint4 normed(const NormFactors& f, const float (&x)[kPiece],
                                        const float (&weight)[kPiece], bool biased,
                                        const float (&bias)[kPiece]) {
  float v[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    v[i] = __fmul_rn(__fmul_rn(__fsub_rn(x[i], f.mean), f.inverse), weight[i]);
    if (biased) v[i] = __fadd_rn(v[i], bias[i]);
  }
  return packed(v);
}

// The same of RMS without a bias.
__device__ __forceinline__ uint4 normed(float inverse, const uint4& piece,
                                        const float (&weight)[kPiece]) {
  float v[kPiece];
  unpack(piece, v);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], inverse), weight[i]);
  return packed(v);
}

// A piece of weights as it was loaded.
struct PieceFloats {
  float values[kPiece];
};
__device__ __forceinline__ PieceFloats as_floats(const uint4& low, const uint4& high) {
  return {{__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(low.z),
           __uint_as_float(low.w), __uint_as_float(high.x), __uint_as_float(high.y),
           __uint_as_float(high.z), __uint_as_float(high.w)}};
}
__device__ __forceinline__ uint4 normed(float inverse, const uint4& piece,
                                        const PieceFloats& weight) {
  return normed(inverse, piece, weight.values);
}

// Weights, or 1 where there are none, of a piece.
__device__ __forceinline__ void load_weights(const NormParams& n, int64_t at, int64_t width,
                                             bool wide, float (&v)[kPiece]) {
  if (n.weight != nullptr) return load_floats(n.weight, at, width, wide, v);
#pragma unroll
  for (float& x : v) x = 1;
}

// With weights and biases from memory.
__device__ __forceinline__ uint4 normed(const NormParams& n, const NormFactors& f,
                                        const uint4& piece, int64_t at, int64_t width, bool wide) {
  float x[kPiece], weight[kPiece], bias[kPiece] = {};
  unpack(piece, x);
  load_weights(n, at, width, wide, weight);
  if (n.bias != nullptr) load_floats(n.bias, at, width, wide, bias);
  return normed(f, x, weight, n.bias != nullptr, bias);
}

// The weights of a row in a lane's registers, requested before the row's sums are known.
template <int kPieces>
struct HeldWeights {
  float values[kPieces][kPiece];

  __device__ __forceinline__ HeldWeights(const NormParams& n, int64_t width, bool wide, int lane) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) load_weights(n, piece_at(c, lane), width, wide, values[c]);
  }
};

// The norm of a held row (Held or HeldFloats), rounded, by all lanes of a warp.
template <int kPieces, class Row>
__device__ __forceinline__ Held<kPieces> norm_held(const NormParams& n,
                                                   const HeldWeights<kPieces>& weights,
                                                   const Row& row, int64_t width, bool wide,
                                                   int lane) {
  const NormFactors f = norm_factors(n, row, width, lane);
  Held<kPieces> out;
  if (n.kind == NormKind::kRms && n.weight == nullptr && n.bias == nullptr) {  // the same, less
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      float x[kPiece];
      row.values(c, x);
#pragma unroll
      for (float& v : x) v = __fmul_rn(v, f.inverse);
      out.pieces[c] = packed(x);
    }
    return out;
  }
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    float x[kPiece], bias[kPiece] = {};
    row.values(c, x);
    if (n.bias != nullptr) load_floats(n.bias, piece_at(c, lane), width, wide, bias);
    out.pieces[c] = normed(f, x, weights.values[c], n.bias != nullptr, bias);
  }
  return out;
}

__device__ __forceinline__ uint4 either(bool first, const uint4& a, const uint4& b) {
  return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

}  // namespace winnow::internal::cuda
