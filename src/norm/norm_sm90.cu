// norm on the device: a warp per row, which it holds in registers: one pass, no shared memory, sums
// by shuffles. Budget: 2 B read and 2 B written a value, and weights from L1. A call of few rows is
// one read of row and weights, asked for together, and one write. Rows of more than 2,048 values
// are read once a sum and once more for the result, from L1 or L2.
#include <cuda_runtime.h>

#include "cuda/prologue.h"
#include "norm/kernel.h"

namespace winnow::internal::norm {

namespace {

constexpr int kWarps = 4;

struct Call {
  Rows rows[2];
  bool wide[2];
};

template <int kPieces>
__device__ __forceinline__ void norm_held(const Rows& rows, const bf16* x, bf16* out, bool wide,
                                          int lane) {
  cuda::Held<kPieces> row;
#pragma unroll
  for (int c = 0; c < kPieces; ++c)
    row.pieces[c] = cuda::load_piece(x, cuda::piece_at(c, lane), rows.width, wide);
  const cuda::NormFactors f = cuda::norm_factors(rows.norm, row, rows.width, lane);
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    cuda::store_piece(out, at, rows.width, wide,
                      cuda::normed(rows.norm, f, row.pieces[c], at, rows.width, wide));
  }
}

__device__ void norm_streamed(const Rows& rows, const bf16* x, bf16* out, bool wide, int lane) {
  const cuda::Streamed row{x, rows.width, lane, wide};
  const cuda::NormFactors f = cuda::norm_factors(rows.norm, row, rows.width, lane);
  for (int c = 0; c < row.count(); ++c) {
    const int64_t at = (int64_t{c} * 32 + lane) * cuda::kPiece;
    cuda::store_piece(out, at, rows.width, wide,
                      cuda::normed(rows.norm, f, row.piece(c), at, rows.width, wide));
  }
}

// kPieces: of a lane, for the longer rows; 0: of any width.
template <int kPieces>
__global__ void __launch_bounds__(kWarps * 32) norm_rows(const __grid_constant__ Call call) {
  int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int set = i >= call.rows[0].count;
  if (set) i -= call.rows[0].count;
  const Rows& rows = call.rows[set];
  if (i >= rows.count) return;
  const bf16* x = rows.x + i * rows.x_stride;
  bf16* out = rows.out + i * rows.out_stride;
  if constexpr (kPieces > 0) norm_held<kPieces>(rows, x, out, call.wide[set], lane);
  else norm_streamed(rows, x, out, call.wide[set], lane);
}

bool is_wide(const Rows& rows) {
  return cuda::is_wide(rows.x, rows.x_stride * 2) && cuda::is_wide(rows.out, rows.out_stride * 2) &&
         cuda::is_wide(rows.norm) && rows.width % cuda::kPiece == 0;
}

template <int kPieces>
void launch(const Call& call, const Device& device) {
  const int64_t count = call.rows[0].count + call.rows[1].count;
  const auto blocks = static_cast<unsigned>(core::ceil_div(count, kWarps));
  norm_rows<kPieces><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(device.stream)>>>(call);
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.rows[0].count + p.rows[1].count == 0) return;
  const Call call{{p.rows[0], p.rows[1]}, {is_wide(p.rows[0]), is_wide(p.rows[1])}};
  const int64_t width = p.rows[0].width > p.rows[1].width ? p.rows[0].width : p.rows[1].width;
  if (width <= 2 * cuda::kWarpValues) launch<2>(call, p.device);
  else if (width <= 6 * cuda::kWarpValues) launch<6>(call, p.device);
  else if (width <= 8 * cuda::kWarpValues) launch<8>(call, p.device);
  else launch<0>(call, p.device);
}

}  // namespace winnow::internal::norm
