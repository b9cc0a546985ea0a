// norm_write on the device: one launch, a warp for each row of norm() and each token of write(),
// one part behind the other (norm_sm90.cuh, write_sm90.cuh).
#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "norm/norm_sm90.cuh"
#include "norm_write/kernel.h"
#include "write/write_sm90.cuh"

namespace winnow::internal::norm_write {

namespace {

constexpr int kWarps = 4;

struct Call {
  norm::Call norm;
  write::sm90::WriteCall write[2];
  int64_t first[2];  // warps before those of each write
};

template <int kPieces>
__global__ void __launch_bounds__(kWarps * 32) rows(const __grid_constant__ Call call) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (i < call.first[0]) return norm::norm_row<kPieces>(call.norm, i, lane);
  const int part = i >= call.first[1];
  const write::sm90::WriteCall& write = call.write[part];
  with_record(write.p.cache.format, [&](auto record) {
    write::sm90::write_token<decltype(record)>(write, i - call.first[part], lane);
  });
}

}  // namespace

void sm90(const Params& p) noexcept {
  const Call call{norm::call_of(p.norm),
                  {write::sm90::call_of(p.write[0]), write::sm90::call_of(p.write[1])},
                  {norm::count_of(p.norm), norm::count_of(p.norm) + p.write[0].tokens}};
  const int64_t warps = call.first[1] + p.write[1].tokens;
  if (warps == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div(warps, int64_t{kWarps}));
  const cudaStream_t stream = cuda::stream_of(p.device);
  if (norm::width_of(p.norm) <= 8 * cuda::kWarpValues)
    rows<8><<<blocks, kWarps * 32, 0, stream>>>(call);
  else rows<0><<<blocks, kWarps * 32, 0, stream>>>(call);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::norm_write
