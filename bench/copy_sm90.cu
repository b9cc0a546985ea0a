// A plain copy: the floor of a kernel that reads and writes as many bytes in as short a time.
#include <cuda_runtime.h>

#include "cuda_backend.h"

namespace winnow::bench {

namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // loads of a thread

__global__ void __launch_bounds__(kThreads) copy(uint4* to, const uint4* from, size_t count) {
  const size_t first = size_t{blockIdx.x} * (kThreads * kEach) + threadIdx.x;
  uint4 held[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (first + i * kThreads < count) held[i] = from[first + i * kThreads];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (first + i * kThreads < count) to[first + i * kThreads] = held[i];
}

}  // namespace

void cuda_copy(void* to, const void* from, size_t bytes, void* stream) {
  const size_t count = bytes / sizeof(uint4);
  const size_t each = size_t{kThreads} * kEach;
  copy<<<static_cast<unsigned>((count + each - 1) / each), kThreads, 0,
         static_cast<cudaStream_t>(stream)>>>(static_cast<uint4*>(to),
                                              static_cast<const uint4*>(from), count);
}

}  // namespace winnow::bench
