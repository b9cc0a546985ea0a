// norm on the device: the launch.
#include "norm/norm_sm90.cuh"

#include "cuda/launch.h"

namespace winnow::internal::norm {

namespace {

template <bool kPlain>
__global__ void __launch_bounds__(kWarps * 32) norm_rows(const __grid_constant__ Call call) {
  __shared__ Sums sums;
  norm_block<kPlain>(call, blockIdx.x, sums);
}
__global__ void __launch_bounds__(kFewPieces * 32)
    norm_few_rows(const __grid_constant__ FewCall call) {
  __shared__ Sums sums;
  norm_few(rows_of(call, blockIdx.y > 0), blockIdx.x, sums);
}

// Many rows, all of whose norms are plain.
template <int kLong>
__global__ void __launch_bounds__(kWarps * 32, kLong > 4   ? 8
                                               : kLong > 2 ? 9
                                                           : 12)
    norm_many_rows(const __grid_constant__ Call call) {
  norm_many<kLong>(call, blockIdx.x);
}

}  // namespace

void sm90(const Params& p) noexcept {
  const int pieces = plain_pieces(p);
  if (pieces > 0 && is_few(p)) {
    const int64_t most = p.rows[0].count > p.rows[1].count ? p.rows[0].count : p.rows[1].count;
    const dim3 grid(static_cast<unsigned>(most), p.rows[1].count > 0 ? 2 : 1);
    const int threads = 32 * (pieces > kWarps ? pieces : kWarps);
    norm_few_rows<<<grid, threads, 0, cuda::stream_of(p.device)>>>(few_of(p));
    return cuda::keep_error(cudaGetLastError());
  }
  const bool many = pieces > 0 && is_many(p, pieces);
  const Call call = call_of(p, many);
  const auto blocks = static_cast<unsigned>(call.blocks[0] + call.blocks[1]);
  if (blocks == 0) return;
  auto kernel = pieces > 0 ? norm_rows<true> : norm_rows<false>;
  if (many)
    kernel = pieces > 4   ? norm_many_rows<kManyPieces>
             : pieces > 2 ? norm_many_rows<4>
                          : norm_many_rows<2>;
  kernel<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm
