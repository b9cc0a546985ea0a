// Memory that a call reads or writes: on the host, and on the device as well where calls run there.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "buffer.h"
#include "soak_device.h"
#include "winnow/tensor.h"

namespace winnow::cli::whole {

template <class T>
class Array {
 public:
  Array() = default;
  Array(const Queue& queue, int64_t count)
      : host_(count),
        queue_(&queue),
        device_(queue.cuda() ? std::make_unique<DeviceMemory>(count * sizeof(T)) : nullptr) {}

  int64_t size() const { return static_cast<int64_t>(host_.size()); }
  double bytes() const { return static_cast<double>(host_.size() * sizeof(T)); }
  // The host's copy, and what a call sees.
  T* host() const { return host_.data(); }
  T* data() const { return device_ ? reinterpret_cast<T*>(device_->data()) : host_.data(); }
  std::span<T> span() const { return host_.span(); }
  Tensor view(std::initializer_list<int64_t> shape) const { return tensor(data(), shape); }
  // `count` values of rows that are wider, from column `first` on.
  Tensor columns(int64_t rows, int64_t width, int64_t first, int64_t count) const {
    return tensor(data() + first, {rows, count}, {width, 1});
  }
  void to_device(int64_t count) const {
    if (device_) queue_->to_device(data(), host(), count * sizeof(T));
  }
  void to_device() const { to_device(size()); }
  // Waits for what the device still has to do.
  void to_host(int64_t first, int64_t count) const {
    if (!device_) return;
    queue_->to_host(host() + first, data() + first, count * sizeof(T));
    queue_->wait();
  }
  void to_host() const { to_host(0, size()); }

 private:
  tools::Buffer<T> host_;
  const Queue* queue_ = nullptr;
  std::unique_ptr<DeviceMemory> device_;
};

}  // namespace winnow::cli::whole
