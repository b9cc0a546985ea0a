// Ranks as threads that work on the CPU or, with a stream each, on one device: the double of
// tools/thread_ranks.h, whose collectives copy between the ranks' memory there.
#pragma once

#ifdef WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#include <string>

#include "thread_ranks.h"
#include "winnow/error.h"
#include "winnow/tensor.h"

namespace winnow::testing {

#ifdef WINNOW_WITH_CUDA
inline void expect_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const bool captured = status == cudaErrorStreamCaptureUnsupported;
  throw Error(captured ? ErrorCode::kUnsupported : ErrorCode::kRuntime,
              std::string("threads: ") + what + ": " + cudaGetErrorString(status));
}
#endif

// Null where the build has no CUDA.
inline const tools::ThreadRanks::DeviceMemory* device_memory() {
#ifdef WINNOW_WITH_CUDA
  static constexpr tools::ThreadRanks::DeviceMemory memory{
      [](void* to, const void* from, size_t bytes, const Device& device) {
        expect_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
                                    static_cast<cudaStream_t>(device.stream)),
                    "copy");
      },
      [](const Device& device) {
        expect_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(device.stream)), "wait");
      }};
  return &memory;
#else
  return nullptr;
#endif
}

class DeviceRanks : public tools::ThreadRanks {
 public:
  explicit DeviceRanks(int32_t ranks, std::chrono::milliseconds deadline = std::chrono::seconds(30))
      : ThreadRanks(ranks, deadline, device_memory()) {}
};

// A thread's place on a kind of device: on CUDA with a stream of its own.
class OwnDevice {
 public:
  explicit OwnDevice(DeviceKind kind) {
    if (kind == DeviceKind::kCpu) return;
#ifdef WINNOW_WITH_CUDA
    cudaStream_t stream = nullptr;
    expect_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    device_ = cuda(stream);
#endif
  }
  ~OwnDevice() {
#ifdef WINNOW_WITH_CUDA
    if (device_.stream) cudaStreamDestroy(static_cast<cudaStream_t>(device_.stream));
#endif
  }
  OwnDevice(const OwnDevice&) = delete;
  OwnDevice& operator=(const OwnDevice&) = delete;
  const Device& get() const { return device_; }

 private:
  Device device_ = {};
};

}  // namespace winnow::testing
