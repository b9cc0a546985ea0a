// A bump allocator over a caller's workspace. Sizing and using share one code path: run the same
// takes on a null arena to learn how many bytes they need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/arithmetic.h"
#include "core/namespaces.h"

namespace winnow::internal::core {

class Arena {
 public:
  static constexpr size_t kAlign = 64;
  Arena() = default;  // measures only
  explicit Arena(std::span<std::byte> memory) : base_(memory.data()), limit_(memory.size()) {
    const size_t off = reinterpret_cast<uintptr_t>(base_) % kAlign;
    if (base_ && off) used_ = kAlign - off;
  }

  // count objects of T, aligned to 64 bytes; null when measuring.
  template <class T>
  T* take(size_t count) {
    const bool fits = used_ <= limit_ && count <= (limit_ - used_) / sizeof(T);
    T* p = base_ && fits ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    // A sum beyond the address space sticks at a size that nobody has.
    const bool possible = used_ < kMost && count < (kMost - used_) / sizeof(T);
    used_ = possible ? used_ + round_up(count * sizeof(T), kAlign) : kMost;
    return p;
  }
  // Bytes that a workspace of any alignment needs for the takes so far.
  size_t bytes() const { return used_ + kAlign; }

 private:
  static constexpr size_t kMost = SIZE_MAX / 2;
  std::byte* base_ = nullptr;
  size_t limit_ = 0, used_ = 0;
};

}  // namespace winnow::internal::core
