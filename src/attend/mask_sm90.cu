// topk_mask on the device: a block per stretch of a row. The stretch's bits are set in shared
// memory and then stored byte by byte, so that rows of any alignment work and nothing is read back.
// A stretch of 16 KB covers 131,072 keys; longer rows read their ids once per stretch.
#include <cuda_runtime.h>

#include <algorithm>

#include "attend/mask_kernel.h"

namespace winnow::masking {

namespace {

constexpr int kThreads = 256;
constexpr int kStretch = 16384;       // bytes
constexpr int64_t kMostRows = 65535;  // of a grid's second dimension

__global__ void __launch_bounds__(kThreads) mask_rows(const __grid_constant__ Params p) {
  __shared__ uint32_t bits[kStretch / 4];
  const int64_t t = blockIdx.x;
  int64_t limit = 8 * p.bytes;
  if (p.lengths) limit = min(limit, static_cast<int64_t>(p.lengths[t * p.length_stride]));
  for (int64_t base = blockIdx.y * int64_t{kStretch}; base < p.bytes;
       base += gridDim.y * int64_t{kStretch}) {
    const int bytes = static_cast<int>(min(p.bytes - base, int64_t{kStretch}));
    for (int i = threadIdx.x; i < (bytes + 3) / 4; i += kThreads) bits[i] = 0;
    __syncthreads();
    for (int64_t k = threadIdx.x; k < p.topk; k += kThreads) {
      const int64_t id = p.ids[t * p.id_stride + k];
      const int64_t bit = id - 8 * base;
      if (id >= 0 && id < limit && bit >= 0 && bit < 8 * bytes)
        atomicOr(&bits[bit / 32], 1u << bit % 32);
    }
    __syncthreads();
    const auto* from = reinterpret_cast<const uint8_t*>(bits);
    uint8_t* mask = p.mask + t * p.mask_stride + base;
    for (int i = threadIdx.x; i < bytes; i += kThreads) mask[i] = from[i];
    __syncthreads();
  }
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0 || p.bytes == 0) return;
  const int64_t stretches = std::min((p.bytes + kStretch - 1) / kStretch, kMostRows);
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(stretches));
  mask_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(p.device.stream)>>>(p);
}

}  // namespace winnow::masking
