// norm_write on the device: one launch, the blocks of norm() and those of each write(), a warp per
// token (norm_sm90.cuh, write_sm90.cuh), mixed evenly: a multiprocessor has all kinds at a time,
// and one's waits are filled by the others.
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "norm/norm_sm90.cuh"
#include "norm_write/kernel.h"
#include "write/write_sm90.cuh"

namespace winnow::internal::norm_write {

namespace {

constexpr int kWarps = norm::kWarps;

// Which of the first n blocks belong to one kind, evenly among all: floor(n * share / 2^32).
struct Share {
  uint64_t share = 0;
  __host__ __device__ uint32_t of(uint32_t n) const {
    return static_cast<uint32_t>(n * share >> 32);
  }
  static Share make(int64_t blocks, int64_t all) {  // rounded up, so that of(all) = blocks
    if (blocks == 0) return {};
    return {((static_cast<uint64_t>(blocks) << 32) + static_cast<uint64_t>(all) - 1) /
            static_cast<uint64_t>(all)};
  }
};

struct Call {
  norm::Call norm;
  write::sm90::WriteCall write[2];
  Share shares[2];  // of the first write among all blocks, of the second among what is left
};

__global__ void __launch_bounds__(kWarps * 32) rows(const __grid_constant__ Call call) {
  __shared__ norm::Sums sums;
  uint32_t block = blockIdx.x;
  int part = -1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (part >= 0) continue;
    const uint32_t before = call.shares[i].of(block);
    if (call.shares[i].of(block + 1) > before) {
      part = i;
      block = before;
    } else {
      block -= before;
    }
  }
  if (part < 0) return norm::norm_block(call.norm, block, sums);
  const write::sm90::WriteCall& write = call.write[part];
  const int64_t token = int64_t{block} * kWarps + threadIdx.x / 32;
  with_record(write.p.cache.format, [&](auto record) {
    write::sm90::write_token<decltype(record)>(write, token, threadIdx.x % 32);
  });
}

}  // namespace

void sm90(const Params& p) noexcept {
  Call call{norm::call_of(p.norm),
            {write::sm90::call_of(p.write[0]), write::sm90::call_of(p.write[1])}};
  int64_t all = call.norm.blocks[0] + call.norm.blocks[1];
  for (int i = 1; i >= 0; --i) {
    const int64_t blocks = ceil_div(p.write[i].tokens, int64_t{kWarps});
    all += blocks;
    call.shares[i] = Share::make(blocks, all);
  }
  const auto blocks = static_cast<unsigned>(all);
  if (blocks == 0) return;
  rows<<<blocks, kWarps * 32, 0, cuda::stream_of(p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm_write
