// Memory of the CUDA runtime: all of it is the host's, so pointers of host and device are equal.
// Every piece lies between two gaps that belong to nobody, and begins full of bytes 0xff.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "memory.h"
#include "runtime.h"

namespace winnow::emulated {

namespace {

constexpr size_t kDeviceBytes = size_t{141} * 1000 * 1000 * 1000;
constexpr size_t kAlign = 512, kGap = 4096;
constexpr size_t kManyBytes = size_t{64} << 20;
constexpr int kPoison = 0xff;

enum class Home { kDevice, kHost, kManaged };
struct Allocation {
  Home home;
  void* mapping;
  size_t mapped;  // bytes; 0: the mapping is from malloc()
  size_t bytes;
};
struct Memory {
  std::map<void*, Allocation> allocations;
  size_t used = 0;
};
Memory& memory() {
  static auto* const all = new Memory;
  return *all;
}

// A file of kManyBytes poisoned bytes, or -1.
int make_poison() {
  const int file = memfd_create("poison", 0);
  if (file < 0) return -1;
  void* bytes = MAP_FAILED;
  if (ftruncate(file, kManyBytes) == 0)
    bytes = mmap(nullptr, kManyBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (bytes == MAP_FAILED) {
    close(file);
    return -1;
  }
  std::memset(bytes, kPoison, kManyBytes);
  munmap(bytes, kManyBytes);
  return file;
}

// Poisoned memory that takes pages of the machine only where it is written: tests ask for more than
// the machine has. Null if there is none.
void* map_many(size_t bytes) {
  static const int poison = make_poison();
  if (poison < 0) return nullptr;
  void* const all =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  for (size_t at = 0; at < bytes; at += kManyBytes) {
    const size_t part = std::min(kManyBytes, bytes - at);
    void* const mapped = mmap(static_cast<std::byte*>(all) + at, part, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison, 0);
    if (mapped == MAP_FAILED) {
      munmap(all, bytes);
      return nullptr;
    }
  }
  return all;
}

cudaError_t allocate(void** result, size_t bytes, Home home) {
  return call(Waits::kYes, [&] {
    if (!result) return cudaErrorInvalidValue;
    if (const cudaError_t e = forbidden_by_capture()) return e;
    *result = nullptr;
    if (bytes == 0) return cudaSuccess;
    const size_t room = home == Home::kHost ? SIZE_MAX - 4 * kGap : kDeviceBytes - memory().used;
    if (bytes > room) return cudaErrorMemoryAllocation;
    const size_t total = kGap + (bytes + kAlign - 1) / kAlign * kAlign + kGap;
    Allocation made{home, nullptr, 0, bytes};
    if (total >= kManyBytes) {
      made.mapped = total;
      made.mapping = map_many(total);
    } else if ((made.mapping = std::aligned_alloc(kAlign, total))) {
      std::memset(made.mapping, kPoison, total);
    }
    if (!made.mapping) return cudaErrorMemoryAllocation;
    *result = static_cast<std::byte*>(made.mapping) + kGap;
    memory().allocations.emplace(*result, made);
    if (home != Home::kHost) memory().used += bytes;
    add_memory(*result, bytes);
    return cudaSuccess;
  });
}

cudaError_t release(void* begin, bool host) {
  return call(Waits::kYes, [&] {
    if (!begin) return cudaSuccess;
    if (const cudaError_t e = forbidden_by_capture()) return e;
    const auto found = memory().allocations.find(begin);
    if (found == memory().allocations.end()) return cudaErrorInvalidValue;
    const Allocation allocation = found->second;
    if ((allocation.home == Home::kHost) != host) return cudaErrorInvalidValue;
    remove_memory(begin);
    memory().allocations.erase(found);
    if (!host) memory().used -= allocation.bytes;
    if (allocation.mapped > 0) munmap(allocation.mapping, allocation.mapped);
    else std::free(allocation.mapping);
    return cudaSuccess;
  });
}

// ---- copies
// ---------------------------------------------------------------------------------------

bool is_reachable(const void* begin, size_t bytes) {
  return holds(reinterpret_cast<uint64_t>(begin), bytes);
}
// The device's side of a copy lies in one piece of memory. The other may be any memory of the host,
// but none that begins in a piece and ends outside of it.
bool may_copy(const void* begin, size_t bytes, bool device_side) {
  return is_reachable(begin, bytes) || (!device_side && !is_reachable(begin, 1));
}

struct Rows {
  void* to;
  size_t to_stride;
  const void* from;
  size_t from_stride, row_bytes, rows;
};
size_t span_of(size_t stride, const Rows& r) { return (r.rows - 1) * stride + r.row_bytes; }

bool may_copy(const Rows& r, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return may_copy(r.to, span_of(r.to_stride, r), to_device) &&
         may_copy(r.from, span_of(r.from_stride, r), from_device);
}

void copy(const Rows& r, cudaMemcpyKind kind) {
  if (!may_copy(r, kind)) {
    break_device(cudaErrorIllegalAddress, "a copy of memory that was given back");
    return;
  }
  for (size_t i = 0; i < r.rows; ++i)
    std::memmove(static_cast<std::byte*>(r.to) + i * r.to_stride,
                 static_cast<const std::byte*>(r.from) + i * r.from_stride, r.row_bytes);
}

cudaError_t queue_copy(const Rows& r, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
    return cudaErrorInvalidMemcpyDirection;
  if (r.rows == 0 || r.row_bytes == 0) return cudaSuccess;
  if (r.row_bytes > r.to_stride || r.row_bytes > r.from_stride) return cudaErrorInvalidPitchValue;
  if (!may_copy(r, kind)) return cudaErrorInvalidValue;
  return queue(stream, [r, kind] { copy(r, kind); });
}

cudaError_t queue_fill(void* begin, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!is_reachable(begin, bytes)) return cudaErrorInvalidValue;
  return queue(stream, [=] {
    if (is_reachable(begin, bytes)) std::memset(begin, value, bytes);
    else break_device(cudaErrorIllegalAddress, "a fill of memory that was given back");
  });
}

}  // namespace
}  // namespace winnow::emulated

using namespace winnow::emulated;

extern "C" {

cudaError_t cudaMalloc(void** result, size_t bytes) {
  return allocate(result, bytes, Home::kDevice);
}
cudaError_t cudaMallocManaged(void** result, size_t bytes, unsigned) {
  return allocate(result, bytes, Home::kManaged);
}
cudaError_t cudaHostAlloc(void** result, size_t bytes, unsigned) {
  return allocate(result, bytes, Home::kHost);
}
cudaError_t cudaMallocHost(void** result, size_t bytes) {
  return allocate(result, bytes, Home::kHost);
}
cudaError_t cudaFree(void* begin) { return release(begin, false); }
cudaError_t cudaFreeHost(void* begin) { return release(begin, true); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call(Waits::kNo, [&] {
    if (!free || !total) return cudaErrorInvalidValue;
    *total = kDeviceBytes;
    *free = kDeviceBytes - memory().used;
    return cudaSuccess;
  });
}

// A copy that the host waits for may not fall into a capture, of any stream.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return call(Waits::kYes, [&] {
    if (const cudaError_t e = forbidden_by_capture()) return e;
    return queue_copy({to, bytes, from, bytes, bytes, 1}, kind, nullptr);
  });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call(Waits::kNo, [&] {
    return queue_copy({to, bytes, from, bytes, bytes, 1}, kind, stream);
  });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_stride, const void* from, size_t from_stride,
                              size_t row_bytes, size_t rows, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return call(Waits::kNo, [&] {
    return queue_copy({to, to_stride, from, from_stride, row_bytes, rows}, kind, stream);
  });
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               cudaMemcpyKind kind) {
  return call(Waits::kYes, [&] {
    if (const cudaError_t e = forbidden_by_capture()) return e;
    std::byte* const to = variable_of(symbol, offset, bytes);
    if (!to) return cudaErrorInvalidSymbol;
    return queue_copy({to, bytes, from, bytes, bytes, 1}, kind, nullptr);
  });
}
cudaError_t cudaMemset(void* begin, int value, size_t bytes) {
  return call(Waits::kNo, [&] { return queue_fill(begin, value, bytes, nullptr); });
}
cudaError_t cudaMemsetAsync(void* begin, int value, size_t bytes, cudaStream_t stream) {
  return call(Waits::kNo, [&] { return queue_fill(begin, value, bytes, stream); });
}
}
