// norm_write on the device: one launch, the blocks of norm(), then those of each write(), a warp
// per token (norm_sm90.cuh, write_sm90.cuh).
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "norm/norm_sm90.cuh"
#include "norm_write/kernel.h"
#include "write/write_sm90.cuh"

namespace winnow::internal::norm_write {

namespace {

constexpr int kWarps = norm::kWarps;

struct Call {
  norm::Call norm;
  write::sm90::WriteCall write[2];
  int64_t first[2];  // blocks before those of each write
};

__global__ void __launch_bounds__(kWarps * 32) rows(const __grid_constant__ Call call) {
  __shared__ norm::Sums sums;
  const int64_t block = blockIdx.x;
  if (block < call.first[0]) return norm::norm_block(call.norm, block, sums);
  const int part = block >= call.first[1];
  const write::sm90::WriteCall& write = call.write[part];
  const int64_t token = (block - call.first[part]) * kWarps + threadIdx.x / 32;
  with_record(write.p.cache.format, [&](auto record) {
    write::sm90::write_token<decltype(record)>(write, token, threadIdx.x % 32);
  });
}

}  // namespace

void sm90(const Params& p) noexcept {
  Call call{norm::call_of(p.norm),
            {write::sm90::call_of(p.write[0]), write::sm90::call_of(p.write[1])}};
  call.first[0] = call.norm.blocks[0] + call.norm.blocks[1];
  call.first[1] = call.first[0] + ceil_div(p.write[0].tokens, int64_t{kWarps});
  const auto blocks =
      static_cast<unsigned>(call.first[1] + ceil_div(p.write[1].tokens, int64_t{kWarps}));
  if (blocks == 0) return;
  rows<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm_write
