#include "cuda/device.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <utility>

#include "core/check.h"
#include "cuda/launch.h"

namespace winnow::internal::cuda {

namespace {

// Of the launches of this thread since its last check_launch().
thread_local cudaError_t kept_error = cudaSuccess;

// Whether a call has found the device's memory full.
std::atomic<bool> memory_was_full{false};

// CUDA loads a kernel into the device's memory when it is first called. Where that memory is full,
// it says that it is out of memory or that the error is unknown, and it may say the latter of this
// kernel for good: the error is then unknown to CUDA, but not to the user.
std::string cause_of(cudaError_t e) {
  size_t free = 0, total = 0;
  constexpr size_t kLittle = size_t{64} << 20;
  const bool full = cudaMemGetInfo(&free, &total) == cudaSuccess && free < kLittle;
  cudaGetLastError();
  if (e == cudaErrorMemoryAllocation || full) {
    memory_was_full.store(true, std::memory_order_relaxed);
    return cat("; of the device's memory ", free >> 20, " MiB are free");
  }
  if (e == cudaErrorUnknown && memory_was_full.load(std::memory_order_relaxed))
    return "; the device's memory was full when CUDA loaded a kernel (CUDA_MODULE_LOADING=EAGER "
           "loads them at the start)";
  return {};
}

// Throws Error(kRuntime) that names the error as CUDA does, in both ways.
void throw_if(cudaError_t e, const char* stage) {
  if (e == cudaSuccess) return;
  throw Error(ErrorCode::kRuntime, cat(stage, ": CUDA: ", cudaGetErrorName(e), " (",
                                       cudaGetErrorString(e), ")", cause_of(e)));
}

}  // namespace

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
  throw_if(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "plan");
  return memory;
}

void release_pinned(void* memory) noexcept {
  if (memory) cudaFreeHost(memory);
}

void copy_to_device(const Device& device, void* to, const void* from, size_t bytes) noexcept {
  if (bytes > 0) keep_error(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(device)));
}

void copy_rows(const Device& device, const RowCopy& c) noexcept {
  if (c.rows == 0 || c.row_bytes == 0) return;
  keep_error(cudaMemcpy2DAsync(c.to, c.to_stride, c.from, c.row_bytes, c.row_bytes, c.rows,
                               cudaMemcpyDefault, stream_of(device)));
}

void fill(const Device& device, void* to, uint8_t with, size_t bytes) noexcept {
  if (bytes > 0) keep_error(cudaMemsetAsync(to, with, bytes, stream_of(device)));
}

bool capturing(const Device& device) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream_of(device), &status) == cudaSuccess)
    return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the legacy stream, while another is captured
  return true;
}

void* make_mark(const Device& device) {
  const Current current(device);
  cudaEvent_t event = nullptr;
  throw_if(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "plan");
  return event;
}

void release_mark(void* mark) noexcept {
  if (mark) cudaEventDestroy(static_cast<cudaEvent_t>(mark));
}

void pass_mark(void* mark, const Device& device) noexcept {
  if (capturing(device)) return;
  const auto stream = stream_of(device);
  const auto event = static_cast<cudaEvent_t>(mark);
  keep_error(cudaStreamWaitEvent(stream, event, 0));
  keep_error(cudaEventRecord(event, stream));
}

void wait_mark(void* mark) noexcept {
  if (mark) cudaEventSynchronize(static_cast<cudaEvent_t>(mark));
}

void keep_error(cudaError_t result) noexcept {
  if (kept_error == cudaSuccess) kept_error = result;
}

void check_launch(const char* stage) {
  // Taken either way, or the next call would be blamed.
  const cudaError_t last = cudaGetLastError();
  const cudaError_t kept = std::exchange(kept_error, cudaSuccess);
  throw_if(kept != cudaSuccess ? kept : last, stage);
}

}  // namespace winnow::internal::cuda
