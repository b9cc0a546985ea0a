// norm on the device: a warp per row, which it holds in registers: one pass, no shared memory, sums
// by shuffles. Budget: 2 B read and 2 B written a value, and weights from L1. A call of few rows is
// one read of row and weights, asked for together, and one write. Rows of more than 2,048 values
// are read once a sum and once more for the result, from L1 or L2.
#pragma once

#include <cuda_runtime.h>

#include "cuda/prologue.h"
#include "norm/kernel.h"

namespace winnow::internal::norm {

struct Call {
  Rows rows[2];
  bool wide[2];
};

template <int kPieces>
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

// Row i of the call's, by a warp; rows behind the last are none. kPieces: of a lane, for the longer
// rows; 0: of any width.
template <int kPieces>
__device__ __forceinline__ void norm_row(const Call& call, int64_t i, int lane) {
  const int set = i >= call.rows[0].count;
  if (set) i -= call.rows[0].count;
  const Rows& rows = call.rows[set];
  if (i >= rows.count) return;
  const bf16* x = rows.x + i * rows.x_stride;
  bf16* out = rows.out + i * rows.out_stride;
  if constexpr (kPieces > 0) norm_held<kPieces>(rows, x, out, call.wide[set], lane);
  else norm_streamed(rows, x, out, call.wide[set], lane);
}

inline bool is_wide(const Rows& rows) {
  return cuda::is_wide(rows.x, rows.x_stride * 2) && cuda::is_wide(rows.out, rows.out_stride * 2) &&
         cuda::is_wide(rows.norm) && rows.width % cuda::kPiece == 0;
}

inline Call call_of(const Params& p) {
  return {{p.rows[0], p.rows[1]}, {is_wide(p.rows[0]), is_wide(p.rows[1])}};
}
inline int64_t count_of(const Params& p) { return p.rows[0].count + p.rows[1].count; }
inline int64_t width_of(const Params& p) {
  return p.rows[0].width > p.rows[1].width ? p.rows[0].width : p.rows[1].width;
}

}  // namespace winnow::internal::norm
