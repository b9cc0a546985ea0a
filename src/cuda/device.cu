#include "cuda/device.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "core/check.h"

namespace winnow::internal::cuda {

std::string missing() {
  static const std::string reason = []() -> std::string {
    int count = 0, major = 0, minor = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count == 0) {
      cudaGetLastError();
      return cat("no CUDA device (", cudaGetErrorString(e == cudaSuccess ? cudaErrorNoDevice : e),
                 ")");
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    if (major != 9 || minor != 0)
      return cat("needs compute capability 9.0, the device has ", major, ".", minor);
    return {};
  }();
  return reason;
}

int multiprocessors(int index) {
  static std::array<std::atomic<int>, 64> counts{};
  std::atomic<int>& known = counts[static_cast<unsigned>(index) % counts.size()];
  if (int n = known.load(std::memory_order_relaxed); n > 0) return n;
  int n = 1;
  cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, index);
  known.store(n, std::memory_order_relaxed);
  return n;
}

Current::Current(const Device& device) {
  int now = 0;
  if (cudaGetDevice(&now) != cudaSuccess || now == device.index) return;
  if (const cudaError_t e = cudaSetDevice(device.index); e != cudaSuccess) {
    cudaGetLastError();  // or the next call would be blamed
    throw Error(ErrorCode::kInvalidArgument, cat("target.device: expected a CUDA device, found ",
                                                 device.index, " (", cudaGetErrorString(e), ")"));
  }
  before_ = now;
}

Current::~Current() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  if (const cudaError_t e = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable); e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, cat("plan: CUDA: ", cudaGetErrorString(e)));
  return memory;
}

void release_pinned(void* memory) noexcept {
  if (memory) cudaFreeHost(memory);
}

void copy_to_device(const Device& device, void* to, const void* from, size_t bytes) noexcept {
  if (bytes > 0)
    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(device.stream));
}

void* make_mark(const Device& device) {
  const Current current(device);
  cudaEvent_t event = nullptr;
  if (const cudaError_t e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, cat("plan: CUDA: ", cudaGetErrorString(e)));
  return event;
}

void release_mark(void* mark) noexcept {
  if (mark) cudaEventDestroy(static_cast<cudaEvent_t>(mark));
}

void pass_mark(void* mark, const Device& device) noexcept {
  const auto stream = static_cast<cudaStream_t>(device.stream);
  const auto event = static_cast<cudaEvent_t>(mark);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
      status != cudaStreamCaptureStatusNone)
    return;
  cudaStreamWaitEvent(stream, event, 0);
  cudaEventRecord(event, stream);
}

void wait_mark(void* mark) noexcept {
  if (mark) cudaEventSynchronize(static_cast<cudaEvent_t>(mark));
}

void check_launch(const char* stage) {
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, cat(stage, ": CUDA: ", cudaGetErrorString(e)));
}

}  // namespace winnow::internal::cuda
