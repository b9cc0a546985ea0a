// What a launch needs on the host: the stream of a call, and a kernel with much shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "winnow/tensor.h"

namespace winnow::internal::cuda {

inline cudaStream_t stream_of(const Device& device) {
  return static_cast<cudaStream_t>(device.stream);
}

// Keeps the first error since the last check_launch() of this thread. Every launch, and every call
// that readies one, hands its own result here: CUDA's last error may be gone when a later call
// succeeds. Behind <<<>>> the result is cudaGetLastError().
void keep_error(cudaError_t result) noexcept;

// Lets a kernel have more than 48 KB of shared memory, on the current device.
template <class... Args>
cudaError_t allow_shared(void (*kernel)(Args...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// The grid, the CTA's threads, its shared memory and the stream; attributes are added to it.
inline cudaLaunchConfig_t launch_config(dim3 grid, unsigned threads, size_t shared_bytes,
                                        cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

}  // namespace winnow::internal::cuda
