// The block of host memory that a plan's arrays live in: plain, or pinned for a CUDA plan, so that
// one copy on the stream brings them to the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "winnow/tensor.h"

namespace winnow::internal::plan {

class Staging {
 public:
  Staging() = default;
  Staging(const Device& device, size_t count);  // zeros; throws when there is no memory

  // The next `count` numbers of the block, which must have as many left.
  std::span<int32_t> take(size_t count) {
    used_ += count;
    return {memory_.get() + used_ - count, count};
  }
  std::span<const int32_t> all() const { return {memory_.get(), count_}; }

  // CUDA: queues a copy of the block to `to`, on the stream of `device`.
  void send(void* to, const Device& device) noexcept;
  // Waits until the copies queued have run; the replays of a captured graph are not waited for.
  void settle() noexcept;

 private:
  struct Free {
    bool pinned;
    void operator()(int32_t* memory) const noexcept;
  };
  struct FreeMark {
    void operator()(void* mark) const noexcept;
  };
  std::unique_ptr<int32_t, Free> memory_{nullptr, Free{false}};
  std::unique_ptr<void, FreeMark> sent_;  // CUDA: after the last copy
  size_t count_ = 0, used_ = 0;
};

}  // namespace winnow::internal::plan
