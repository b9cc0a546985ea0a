// Memory of the tools: at a multiple of 64 bytes, and pinned and mapped where a CUDA device is to
// read and write it as well.
#pragma once

#include <cstddef>

namespace winnow::tools {

// While one lives, what allocate() gives can be used by the device too, if there is one.
class SharedWithDevice {
 public:
  SharedWithDevice();
  ~SharedWithDevice();
  SharedWithDevice(const SharedWithDevice&) = delete;
  SharedWithDevice& operator=(const SharedWithDevice&) = delete;
};

void* allocate(size_t bytes);  // throws std::bad_alloc
void release(void* memory);    // null is fine

// Waits for the device, so that its results can be read; throws Error if it failed.
void wait_for_device();

}  // namespace winnow::tools
