// norm on the device: RMSNorm or LayerNorm of bf16 rows, by blocks of four warps.
// - Rows of up to 512 values: a warp each, which holds the row in registers.
// - Rows of up to 2,048: four warps each, which exchange their sums through shared memory. Both
// read
//   a row once, and request row and weights together.
// - Longer rows: a warp each, which reads the row once a sum and once more for the result, from L1
//   or L2.
// A norm is plain if it is RMS with weights and no bias, and all is aligned. Few plain rows have a
// block each, whose parameters lie in two cache lines (norm_few()). Many plain rows of up to 1,536
// values have a warp each: 3 KiB of a row in flight, no barrier, and weights from L1
// (norm_many()). Budget: 2 B read and 2 B written a value; 5 million instructions for 8,192 rows
// of 1,536 and of 512, a quarter of the issue slots.
#pragma once

#include <cuda_runtime.h>

#include "cuda/prologue.h"
#include "norm/kernel.h"

namespace winnow::internal::norm {

inline constexpr int kWarps = cuda::kChains;  // of a block
inline constexpr int kPieces = 2;             // of a lane

struct Call {
  Rows rows[2];
  bool wide[2];
  bool shared[2];  // a block per row
  int64_t blocks[2];
};

// What the warps of a row exchange: the sums of their lanes.
struct Sums {
  float values[kWarps][32], squares[kWarps][32];
};

__device__ __forceinline__ float sum_of_warps(float (&sums)[kWarps][32], float own, int warp,
                                              int lane) {
  sums[warp][lane] = own;
  __syncthreads();
  return cuda::warp_sum(cuda::joined(sums[0][lane], sums[1][lane], sums[2][lane], sums[3][lane]));
}

// A row by four warps: warp k has the pieces c with c % 4 = k.
__device__ __forceinline__ void norm_shared(const Rows& rows, const bf16* x, bf16* out, bool wide,
                                            int warp, int lane, Sums& sums) {
  const core::NormParams& n = rows.norm;
  const auto count = static_cast<float>(rows.width);
  int at[kPieces];
  cuda::Held<kPieces> row;
  float weight[kPieces][cuda::kPiece];
  const auto load = [&](bool whole) {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      at[m] = cuda::piece_at(warp + m * kWarps, lane);
      row.pieces[m] = cuda::load_piece(x, at[m], rows.width, whole);
      cuda::load_weights(n, at[m], rows.width, whole, weight[m]);
    }
  };
  wide ? load(true) : load(false);
  float v[cuda::kPiece];
  cuda::NormFactors f;
  float chain = 0;
  if (n.kind == NormKind::kLayer) {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      row.values(m, v);
      chain = cuda::add_values(chain, v);
    }
    f.mean = cuda::mean_of(sum_of_warps(sums.values, chain, warp, lane), count);
    chain = 0;
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      row.values(m, v);
      chain = cuda::add_squares(chain, v, f.mean, rows.width - at[m]);
    }
  } else {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
      row.values(m, v);
      chain = cuda::add_squares(chain, v);
    }
  }
  f.inverse = cuda::inverse_of(n, sum_of_warps(sums.squares, chain, warp, lane), count);
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    float bias[cuda::kPiece] = {};
    if (n.bias != nullptr) cuda::load_floats(n.bias, at[m], rows.width, wide, bias);
    row.values(m, v);
    row.pieces[m] = cuda::normed(f, v, weight[m], n.bias != nullptr, bias);
  }
#pragma unroll
  for (int m = 0; m < kPieces; ++m) cuda::store_piece(out, at[m], rows.width, wide, row.pieces[m]);
}

// The same for a plain norm, with inverse_of(sum of the squares). Weights and row are requested at
// once: after a branch on whether there are weights, these would be requested when the row has
// come.
template <class InverseOf>
__device__ __forceinline__ void norm_shared_plain(const bf16* x, bf16* out, const float* weights,
                                                  int width, int warp, int lane, Sums& sums,
                                                  InverseOf inverse_of) {
  constexpr int kStep = kWarps * cuda::kWarpValues;  // from a piece to the next
  const int first = cuda::piece_at(warp, lane);
  x += first;
  out += first;
  weights += first;
  uint4 row[kPieces], low[kPieces], high[kPieces];  // of a piece and of its weights
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    row[m] = low[m] = high[m] = {};
    if (first + m * kStep >= width) continue;
    row[m] = cuda::load16_now(x + m * kStep);
    low[m] = *reinterpret_cast<const uint4*>(weights + m * kStep);
    high[m] = *reinterpret_cast<const uint4*>(weights + m * kStep + 4);
  }
  float chain = 0;
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    float v[cuda::kPiece];
    cuda::unpack(row[m], v);
    chain = cuda::add_squares(chain, v);
  }
  const float inverse = inverse_of(sum_of_warps(sums.squares, chain, warp, lane));
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    if (first + m * kStep >= width) continue;
    cuda::store16(out + m * kStep, cuda::normed(inverse, row[m], cuda::as_floats(low[m], high[m])));
  }
}

// A row of up to kPieces pieces a lane by a warp, of few: weights and row at once.
__device__ __forceinline__ void norm_plain_few(const Rows& rows, const bf16* x, bf16* out,
                                               int lane) {
  const auto width = static_cast<int>(rows.width);
  const int first = cuda::piece_at(0, lane);
  const float* weights = rows.norm.weight + first;
  cuda::Held<kPieces> row;
  uint4 low[kPieces], high[kPieces];
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    row.pieces[c] = low[c] = high[c] = {};
    if (cuda::piece_at(c, lane) >= width) continue;
    row.pieces[c] = cuda::load16_now(x + first + c * cuda::kWarpValues);
    low[c] = *reinterpret_cast<const uint4*>(weights + c * cuda::kWarpValues);
    high[c] = *reinterpret_cast<const uint4*>(weights + c * cuda::kWarpValues + 4);
  }
  const float inverse = cuda::rms_factors(rows.norm, row, width).inverse;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    if (cuda::piece_at(c, lane) >= width) continue;
    cuda::store16(out + first + c * cuda::kWarpValues,
                  cuda::normed(inverse, row.pieces[c], cuda::as_floats(low[c], high[c])));
  }
}

// Rows of up to kLong pieces a lane whose norm is plain (cuda/prologue.h), a warp per row: loads
// know that they are whole, and the weights come piece by piece from L1.
template <int kLong>
__device__ __forceinline__ void norm_plain(const Rows& rows, const bf16* x, bf16* out, int lane) {
  const auto width = static_cast<int>(rows.width);
  cuda::Held<kLong> row;
  cuda::load_whole(x, width, lane, row);
  const float inverse = cuda::rms_factors(rows.norm, row, width).inverse;
  const float* weights = rows.norm.weight + lane * cuda::kPiece;
  bf16* to = out + lane * cuda::kPiece;
#pragma unroll
  for (int c = 0; c < kLong; ++c) {
    if (cuda::piece_at(c, lane) >= width) continue;
    float weight[cuda::kPiece];
    cuda::load_floats(weights + c * cuda::kWarpValues, 0, cuda::kPiece, true, weight);
    cuda::store16(to + c * cuda::kWarpValues, cuda::normed(inverse, row.pieces[c], weight));
  }
}

__device__ __forceinline__ void norm_held(const Rows& rows, const bf16* x, bf16* out, bool wide,
                                          int lane) {
  cuda::Held<kPieces> row;
  cuda::load_row(x, rows.width, wide, lane, row);
  const cuda::HeldWeights<kPieces> weights(rows.norm, rows.width, wide, lane);
  cuda::store_row(out, rows.width, wide, lane,
                  cuda::norm_held(rows.norm, weights, row, rows.width, wide, lane));
}

__device__ __forceinline__ void norm_streamed(const Rows& rows, const bf16* x, bf16* out, bool wide,
                                              int lane) {
  const cuda::Streamed row{x, rows.width, lane, wide};
  const cuda::NormFactors f = cuda::norm_factors(rows.norm, row, rows.width, lane);
  for (int c = 0; c < row.count(); ++c) {
    const int64_t at = (int64_t{c} * 32 + lane) * cuda::kPiece;
    cuda::store_piece(out, at, rows.width, wide,
                      cuda::normed(rows.norm, f, row.piece(c), at, rows.width, wide));
  }
}

// Few rows whose norm is plain: a block each, rows in the grid's first dimension, sets in the
// second.
struct FewRows {
  const bf16* x;
  bf16* out;
  const float* weights;
  uint32_t x_stride, out_stride, count;
  int width;
  float of_width;  // 1 / width
  float eps;
};
struct FewCall {
  FewRows rows[2];
};

// One of the two sets, without an index into the parameters, which would take longer.
__device__ __forceinline__ FewRows rows_of(const FewCall& call, bool second) {
  const FewRows& a = call.rows[0];
  const FewRows& b = call.rows[1];
  return {second ? b.x : a.x,
          second ? b.out : a.out,
          second ? b.weights : a.weights,
          second ? b.x_stride : a.x_stride,
          second ? b.out_stride : a.out_stride,
          second ? b.count : a.count,
          second ? b.width : a.width,
          second ? b.of_width : a.of_width,
          second ? b.eps : a.eps};
}

// A row by as many warps as it has pieces, or four. The first four add up the squares, of a chain
// each (prologue.h), and every warp finishes the piece of its number.
__device__ __forceinline__ void norm_few(const FewRows& rows, uint32_t row, Sums& sums) {
  constexpr int kStep = kWarps * cuda::kWarpValues;  // from a chain's piece to its next
  if (row >= rows.count) return;
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int at = cuda::piece_at(warp, lane);
  const bf16* x = cuda::at_product(rows.x, row, rows.x_stride) + at;
  const bool has = at < rows.width;
  const bool has_more = warp < kWarps && at + kStep < rows.width;
  uint4 own{}, more{}, low{}, high{};
  if (has) own = cuda::load16_now(x);
  if (has_more) more = cuda::load16_now(x + kStep);
  if (has) low = *reinterpret_cast<const uint4*>(rows.weights + at);
  if (has) high = *reinterpret_cast<const uint4*>(rows.weights + at + 4);
  if (warp < kWarps) {
    float v[cuda::kPiece];
    cuda::unpack(own, v);
    float chain = cuda::add_squares(0, v);
    cuda::unpack(more, v);
    sums.squares[warp][lane] = cuda::add_squares(chain, v);
  }
  __syncthreads();
  const auto& of = sums.squares;
  const float squares =
      cuda::warp_sum(cuda::joined(of[0][lane], of[1][lane], of[2][lane], of[3][lane]));
  const float inverse =
      cuda::inverse_of(rows.eps, squares, static_cast<float>(rows.width), rows.of_width);
  if (has)
    cuda::store16(cuda::at_product(rows.out, row, rows.out_stride) + at,
                  cuda::normed(inverse, own, cuda::as_floats(low, high)));
}

// Block `block` of the call, by all of its threads.
template <bool kPlain>
__device__ __forceinline__ void norm_block(const Call& call, int64_t block, Sums& sums) {
  const int set = block >= call.blocks[0];
  if (set) block -= call.blocks[0];
  const Rows& rows = call.rows[set];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t i = call.shared[set] ? block : block * kWarps + warp;
  if (i >= rows.count) return;
  const bf16* x = rows.x + i * rows.x_stride;
  bf16* out = rows.out + i * rows.out_stride;
  const bool wide = call.wide[set];
  const auto inverse_of = [&](float squares) {
    return cuda::inverse_of(rows.norm, squares, static_cast<float>(rows.width));
  };
  if (kPlain && call.shared[set])
    norm_shared_plain(x, out, rows.norm.weight, static_cast<int>(rows.width), warp, lane, sums,
                      inverse_of);
  else if (kPlain) norm_plain_few(rows, x, out, lane);
  else if (call.shared[set]) norm_shared(rows, x, out, wide, warp, lane, sums);
  else if (rows.width <= kPieces * cuda::kWarpValues) norm_held(rows, x, out, wide, lane);
  else norm_streamed(rows, x, out, wide, lane);
}

// Block `block` of a call whose norms are all plain and whose rows are many: kLong pieces a lane.
template <int kLong>
__device__ __forceinline__ void norm_many(const Call& call, int64_t block) {
  const int set = block >= call.blocks[0];
  if (set) block -= call.blocks[0];
  const Rows& rows = call.rows[set];
  const int64_t i = block * kWarps + static_cast<int>(threadIdx.x) / 32;
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  if (i >= rows.count) return;
  const bf16* x = rows.x + i * rows.x_stride;
  bf16* out = rows.out + i * rows.out_stride;
  if (rows.width <= kPieces * cuda::kWarpValues) norm_plain<kPieces>(rows, x, out, lane);
  else norm_plain<kLong>(rows, x, out, lane);
}

inline bool is_wide(const Rows& rows) {
  return cuda::is_wide(rows.x, rows.x_stride * 2) && cuda::is_wide(rows.out, rows.out_stride * 2) &&
         cuda::is_wide(rows.norm) && rows.width % cuda::kPiece == 0;
}

inline constexpr int kFewPieces = 8, kManyPieces = 6;  // of the longest rows that plain ways take
inline constexpr int64_t kMany = 1024;                 // rows

// The longest row's pieces if all norms are plain; 0: they are not, or there is no row.
inline int plain_pieces(const Params& p) {
  int64_t width = 0;
  for (const Rows& rows : p.rows) {
    if (rows.count == 0) continue;
    if (!is_wide(rows) || !cuda::is_plain(rows.norm)) return 0;
    width = rows.width > width ? rows.width : width;
  }
  const int64_t pieces = core::ceil_div(width, int64_t{cuda::kWarpValues});
  return pieces <= kFewPieces ? static_cast<int>(pieces) : 0;
}
inline bool is_many(const Params& p, int pieces) {
  return pieces <= kManyPieces && p.rows[0].count + p.rows[1].count >= kMany;
}

// Whether norm_few() takes a call whose norms are plain.
inline bool is_few(const Params& p) {
  constexpr int64_t kFew = 256;  // rows
  if (p.rows[0].count + p.rows[1].count > kFew) return false;
  for (const Rows& rows : p.rows)
    if (!cuda::fits_product(rows.x_stride) || !cuda::fits_product(rows.out_stride)) return false;
  return true;
}
inline FewCall few_of(const Params& p) {
  FewCall call{};
  for (int i = 0; i < 2; ++i) {
    const Rows& rows = p.rows[i];
    if (rows.count == 0) continue;
    call.rows[i] = {.x = rows.x,
                    .out = rows.out,
                    .weights = rows.norm.weight,
                    .x_stride = static_cast<uint32_t>(rows.x_stride),
                    .out_stride = static_cast<uint32_t>(rows.out_stride),
                    .count = static_cast<uint32_t>(rows.count),
                    .width = static_cast<int>(rows.width),
                    .of_width = 1 / static_cast<float>(rows.width),
                    .eps = rows.norm.eps};
  }
  return call;
}

// `many`: a warp takes each row.
inline Call call_of(const Params& p, bool many) {
  constexpr int64_t kHeld = kPieces * cuda::kWarpValues;
  Call call;
  for (int i = 0; i < 2; ++i) {
    const Rows& rows = p.rows[i];
    call.rows[i] = rows;
    call.wide[i] = is_wide(rows);
    call.shared[i] = !many && rows.width > kHeld && rows.width <= kWarps * kHeld;
    call.blocks[i] = call.shared[i] ? rows.count : core::ceil_div(rows.count, int64_t{kWarps});
  }
  return call;
}

}  // namespace winnow::internal::norm
