// Owned memory at a multiple of 64 bytes, zeroed.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "device_memory.h"

namespace winnow::tools {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : count_(static_cast<size_t>(count)) {
    const size_t bytes = count_ * sizeof(T);
    memory_.reset(static_cast<T*>(allocate(bytes)));
    std::memset(static_cast<void*>(memory_.get()), 0, bytes);
  }

  T* data() const { return memory_.get(); }
  size_t size() const { return count_; }
  T& operator[](int64_t i) const { return memory_.get()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + count_; }
  std::span<T> span() const { return {data(), count_}; }
  std::span<T> span(int64_t first, int64_t count) const {
    return span().subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }

 private:
  struct Free {
    void operator()(T* p) const { release(p); }
  };
  size_t count_ = 0;
  std::unique_ptr<T, Free> memory_;
};

}  // namespace winnow::tools
