// The CUDA device as the kernel tables and verbs see it. No CUDA header in here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "winnow/tensor.h"

namespace winnow::internal::cuda {

// "" if a Hopper device is there, else the reason: the machine check of every sm90 kernel.
std::string missing();

// Multiprocessors of a device, read once.
int multiprocessors(int index);

// Makes `device` current for the life of the object (a launch goes to the current device). Throws
// Error(kInvalidArgument) if there is no such device.
class Current {
 public:
  explicit Current(const Device& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = -1;
};

// Host memory that the device copies from without a detour. Throws Error(kRuntime) when there is
// none; release_pinned() takes null.
void* allocate_pinned(size_t bytes);
void release_pinned(void* memory) noexcept;

// Queues a copy of pinned host memory to the device, on the stream of `device`. A captured graph
// copies what is there when it is replayed.
void copy_to_device(const Device& device, void* to, const void* from, size_t bytes) noexcept;

// Queues a copy of rows that lie one after the other to rows with a stride, in bytes.
struct RowCopy {
  void* to;
  size_t to_stride;
  const void* from;
  size_t row_bytes, rows;
};
void copy_rows(const Device& device, const RowCopy& copy) noexcept;
// Queues the setting of bytes.
void fill(const Device& device, void* to, uint8_t with, size_t bytes) noexcept;

// Whether the stream of `device` is being captured: the host cannot wait for it then.
bool capturing(const Device& device) noexcept;

// A point of a stream that the host can wait for. Passing it again, on any stream, moves it behind
// both places; a stream under capture is left alone. Never passed, it is not waited for.
void* make_mark(const Device& device);  // throws Error(kRuntime)
void release_mark(void* mark) noexcept;
void pass_mark(void* mark, const Device& device) noexcept;
void wait_mark(void* mark) noexcept;

// Throws Error(kRuntime) naming the stage if a launch since the last check failed. Does not wait.
void check_launch(const char* stage);

}  // namespace winnow::internal::cuda
