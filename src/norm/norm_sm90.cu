// norm on the device: the launch.
#include "norm/norm_sm90.cuh"

#include "cuda/launch.h"

namespace winnow::internal::norm {

namespace {

__global__ void __launch_bounds__(kWarps * 32) norm_rows(const __grid_constant__ Call call) {
  __shared__ Sums sums;
  norm_block(call, blockIdx.x, sums);
}

}  // namespace

void sm90(const Params& p) noexcept {
  const Call call = call_of(p);
  const auto blocks = static_cast<unsigned>(call.blocks[0] + call.blocks[1]);
  if (blocks == 0) return;
  norm_rows<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm
