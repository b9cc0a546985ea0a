// norm on the device: the launch.
#include "norm/norm_sm90.cuh"

#include "cuda/launch.h"

namespace winnow::internal::norm {

namespace {

constexpr int kWarps = 4;

template <int kPieces>
__global__ void __launch_bounds__(kWarps * 32) norm_rows(const __grid_constant__ Call call) {
  norm_row<kPieces>(call, int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, threadIdx.x % 32);
}

template <int kPieces>
void launch(const Params& p) {
  const auto blocks = static_cast<unsigned>(core::ceil_div(count_of(p), kWarps));
  norm_rows<kPieces><<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call_of(p));
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (count_of(p) == 0) return;
  const int64_t width = width_of(p);
  if (width <= 2 * cuda::kWarpValues) launch<2>(p);
  else if (width <= 6 * cuda::kWarpValues) launch<6>(p);
  else if (width <= 8 * cuda::kWarpValues) launch<8>(p);
  else launch<0>(p);
}

}  // namespace winnow::internal::norm
