// What `winnow soak` and `winnow layer` need of a CUDA device beyond the library: memory, streams,
// captured graphs. A build without CUDA has all of it too, and throws where a device is requested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "winnow/tensor.h"

namespace winnow::cli {

// Throws Error(kUnsupported) if this build or machine has no CUDA device.
void expect_cuda();

// Bytes of device memory that are in use, by anyone; 0 without a device.
int64_t device_bytes_used();

// Memory of the device; nothing where there are no bytes.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  // NOLINTNEXTLINE(performance-trivially-destructible): a build with CUDA releases what it holds.
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

// The device of a call, and the queue it runs on. Where it is the CPU, waiting and copying do
// nothing.
class Queue {
 public:
  explicit Queue(bool cuda);
  // NOLINTNEXTLINE(performance-trivially-destructible): a build with CUDA releases what it holds.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  bool cuda() const { return cuda_; }
  Device device() const { return cuda_ ? winnow::cuda(stream_) : cpu(); }
  void to_device(void* to, const void* from, size_t bytes) const;
  void to_host(void* to, const void* from, size_t bytes) const;
  void wait() const;  // throws Error(kRuntime) if the device failed

 private:
  bool cuda_;
  void* stream_ = nullptr;
};

// What `run` queues, captured once, for any number of replays.
class Replay {
 public:
  Replay(const Queue& queue, const std::function<void()>& run);
  // NOLINTNEXTLINE(performance-trivially-destructible): a build with CUDA releases what it holds.
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  void launch(int64_t times) const;

 private:
  // Of a build with CUDA.
  [[maybe_unused]] void* stream_;
  [[maybe_unused]] void* graph_ = nullptr;
  [[maybe_unused]] void* ready_ = nullptr;
};

}  // namespace winnow::cli
