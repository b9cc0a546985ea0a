// A rank's part of every row's keys, on the device: the ends are there and may change between the
// replays of a graph. A thread for each token.
#include <cuda_runtime.h>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "parallel/on_device.h"

namespace winnow::internal::parallel {

namespace {

__global__ void shares(const __grid_constant__ KeyShares s) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= s.tokens) return;
  const int64_t end = s.all_ends[t];
  s.starts[t] = static_cast<int32_t>(end * s.rank / s.ranks);
  s.ends[t] = static_cast<int32_t>(end * (s.rank + 1) / s.ranks);
}

}  // namespace

void share_keys_sm90(const KeyShares& s) noexcept {
  if (s.tokens == 0) return;
  constexpr int kThreads = 128;
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(s.tokens, kThreads));
  shares<<<blocks, kThreads, 0, cuda::stream_of(s.device)>>>(s);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::parallel
