#include "device_memory.h"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <string>

#include "winnow/error.h"

#ifdef WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::tools {

namespace {

constexpr size_t kAlign = 64;
enum class Kind : uint64_t { kPlain, kPinned };  // in front of every allocation
int sharing = 0;

#ifdef WINNOW_WITH_CUDA
bool device_present() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
#endif

}  // namespace

SharedWithDevice::SharedWithDevice() { ++sharing; }
SharedWithDevice::~SharedWithDevice() { --sharing; }

void* allocate(size_t bytes) {
  const size_t total = kAlign + (bytes + kAlign - 1) / kAlign * kAlign;
  void* memory = nullptr;
  Kind kind = Kind::kPlain;
#ifdef WINNOW_WITH_CUDA
  if (sharing > 0 && device_present() &&
      cudaHostAlloc(&memory, total, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess)
    kind = Kind::kPinned;
#endif
  if (kind == Kind::kPlain) memory = std::aligned_alloc(kAlign, total);
  if (!memory) throw std::bad_alloc();
  *static_cast<Kind*>(memory) = kind;
  return static_cast<std::byte*>(memory) + kAlign;
}

void release(void* memory) {
  if (!memory) return;
  void* first = static_cast<std::byte*>(memory) - kAlign;
#ifdef WINNOW_WITH_CUDA
  if (*static_cast<Kind*>(first) == Kind::kPinned) {
    cudaFreeHost(first);
    return;
  }
#endif
  std::free(first);
}

void wait_for_device() {
#ifdef WINNOW_WITH_CUDA
  if (!device_present()) return;
  if (const cudaError_t e = cudaDeviceSynchronize(); e != cudaSuccess)
    throw Error(ErrorCode::kRuntime, std::string("CUDA: ") + cudaGetErrorString(e));
#endif
}

}  // namespace winnow::tools
