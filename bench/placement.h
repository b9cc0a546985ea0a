// Where a problem's tensors live: in the host's buffers, or on a device that the benchmark fills
// itself (a cache of gigabytes would take minutes to make on the host and copy).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <vector>

#include "buffer.h"
#include "random.h"
#include "winnow/tensor.h"

namespace winnow::bench {

// The device of this name ("cpu", "cuda"); on CUDA its stream is the one that the harness times.
Device device_of(const char* name);

void wait_for(const Device& device);  // until its stream is done; nothing on the CPU

// Bytes of their elements, as many as one pass over all of them moves.
double bytes_of(std::initializer_list<Tensor> tensors);

class Placement {
 public:
  explicit Placement(const Device& device) : device_(device) {}
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  const Device& device() const { return device_; }
  bool on_host() const { return device_.kind == DeviceKind::kCpu; }

  // Memory on the device, zeroed; freed with the placement.
  std::byte* bytes(size_t count);
  void upload(void* to, const void* from, size_t count) const;

  // An output of this shape, in `buffer` or on the device.
  template <class T>
  Tensor room(tools::Buffer<T>& buffer, std::initializer_list<int64_t> shape) {
    const int64_t count = tensor<T>(nullptr, shape).size();
    if (on_host()) buffer = tools::Buffer<T>(count);
    return tensor(on_host() ? buffer.data() : reinterpret_cast<T*>(bytes(count * sizeof(T))),
                  shape);
  }
  // What `buffer` holds.
  template <class T>
  Tensor copied(const tools::Buffer<T>& buffer, std::initializer_list<int64_t> shape) {
    if (on_host()) return tensor(buffer.data(), shape);
    std::byte* memory = bytes(buffer.size() * sizeof(T));
    upload(memory, buffer.data(), buffer.size() * sizeof(T));
    return tensor(reinterpret_cast<T*>(memory), shape);
  }
  // Normal numbers; on a device a few million of them from anywhere on, over and over.
  template <class T>
  Tensor normals(tools::Buffer<T>& buffer, std::initializer_list<int64_t> shape,
                 tools::Random& random, float sigma = 1.0f) {
    const int64_t count = tensor<T>(nullptr, shape).size();
    if (on_host()) {
      buffer = tools::Buffer<T>(count);
      random.normals(buffer.span(), sigma);
      return tensor(buffer.data(), shape);
    }
    const tools::Buffer<T>& block = block_of<T>(sigma);
    std::byte* memory = bytes(count * sizeof(T));
    int64_t from = random.draw(0, kBlock - 1);
    for (int64_t at = 0, n = 0; at < count; at += n, from = 0) {
      n = count - at < kBlock - from ? count - at : kBlock - from;
      upload(memory + at * sizeof(T), block.data() + from, n * sizeof(T));
    }
    return tensor(reinterpret_cast<T*>(memory), shape);
  }
  std::span<std::byte> workspace(tools::Buffer<std::byte>& buffer, size_t count);

 private:
  static constexpr int64_t kBlock = (int64_t{1} << 22) - 9;  // odd: rows do not repeat soon

  // Made once: 4 M of them take longer than most of what is timed with them.
  template <class T>
  static const tools::Buffer<T>& block_of(float sigma) {
    static std::map<float, tools::Buffer<T>> kept;
    tools::Buffer<T>& block = kept[sigma];
    if (block.size() == 0) {
      block = tools::Buffer<T>(kBlock);
      tools::Random(1).normals(block.span(), sigma);
    }
    return block;
  }

  Device device_;
  std::vector<void*> owned_;
};

}  // namespace winnow::bench
