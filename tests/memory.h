// Memory that the kernel under test can reach: plain, or mapped pinned memory when a CUDA kernel is
// tested, so that one test serves both and guard bytes are checked on the host.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "winnow/tensor.h"

#ifdef WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::testing {

inline bool device_present() {
#ifdef WINNOW_WITH_CUDA
  static const bool present = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }();
  return present;
#else
  return false;
#endif
}

// Set by tests that run under a checker of the device: each allocation is memory of the device that
// the host can reach too, and not a byte longer than requested, so that the checker sees a read
// behind its end.
inline bool exact_allocations = false;

inline void* allocate(size_t bytes) {
#ifdef WINNOW_WITH_CUDA
  if (exact_allocations) {
    void* p = nullptr;
    if (cudaMallocManaged(&p, bytes > 0 ? bytes : 1) != cudaSuccess) throw std::bad_alloc();
    return p;
  }
  if (void* p = nullptr;
      device_present() && cudaHostAlloc(&p, bytes, cudaHostAllocMapped) == cudaSuccess)
    return p;
#endif
  return ::operator new(bytes);
}

inline void release(void* p) {
#ifdef WINNOW_WITH_CUDA
  if (exact_allocations) {
    cudaFree(p);
    return;
  }
  if (device_present()) {
    cudaFreeHost(p);
    return;
  }
#endif
  ::operator delete(p);
}

// A vector in such memory.
template <class T>
struct Mapped {
  using value_type = T;
  Mapped() = default;
  template <class U>
  Mapped(const Mapped<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(testing::allocate(count * sizeof(T))); }
  void deallocate(T* p, size_t) { release(p); }
  bool operator==(const Mapped&) const = default;
};
template <class T>
using MappedVector = std::vector<T, Mapped<T>>;

// Waits for the device, so that results can be read. False if the device reported an error.
inline bool device_finished() {
#ifdef WINNOW_WITH_CUDA
  if (device_present()) return cudaDeviceSynchronize() == cudaSuccess;
#endif
  return true;
}

// The same for what is queued on the stream of `device`: other threads may use the device.
inline bool stream_finished([[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda)
    return cudaStreamSynchronize(static_cast<cudaStream_t>(device.stream)) == cudaSuccess;
#endif
  return true;
}

// A workspace where a call on `device` needs it: device memory for CUDA (counters there are updated
// with atomics, which mapped memory may lack), plain memory for the CPU.
class DeviceWorkspace {
 public:
  DeviceWorkspace(const Device& device, size_t bytes)
      : cuda_(device.kind == DeviceKind::kCuda), bytes_(bytes) {
#ifdef WINNOW_WITH_CUDA
    if (cuda_) {
      cudaMalloc(&data_, bytes + 1);
      cudaMemset(data_, 0, bytes + 1);
      cudaDeviceSynchronize();  // the call's stream may not wait for the default one
      return;
    }
#endif
    data_ = ::operator new(bytes + 1);
  }
  ~DeviceWorkspace() {
#ifdef WINNOW_WITH_CUDA
    if (cuda_) {
      cudaFree(data_);
      return;
    }
#endif
    ::operator delete(data_);
  }
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;
  void* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  [[maybe_unused]] bool cuda_;
  void* data_ = nullptr;
  size_t bytes_;
};

}  // namespace winnow::testing
