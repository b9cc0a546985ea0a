// One verb as a call on device memory with two sets of contents, for the tests that ask the same of
// all of them: the addresses stay, what stands there changes.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "core/formats.h"
#include "testing.h"
#include "winnow/model.h"

namespace winnow::testing {

// One call: its inputs in two versions, outputs and workspace, all in memory of the device.
class Verb {
 public:
  std::string name;
  std::function<void(const Device&)> run;

  explicit Verb(std::string n) : name(std::move(n)) {}
  Verb(const Verb&) = delete;
  Verb& operator=(const Verb&) = delete;
  ~Verb() {
    for (const Block& b : blocks_) cudaFree(b.data);
  }

  template <class T>
  T* input(const std::vector<T>& first, const std::vector<T>& second) {
    EXPECT_EQ(first.size(), second.size());
    Block& b = add(first.size() * sizeof(T));
    b.contents[0].assign(reinterpret_cast<const char*>(first.data()), b.bytes);
    b.contents[1].assign(reinterpret_cast<const char*>(second.data()), b.bytes);
    return static_cast<T*>(b.data);
  }
  // Contents from a function of the generator; both versions differ.
  template <class T, class F>
  T* input(int64_t count, F&& value) {
    std::vector<T> versions[2];
    for (std::vector<T>& v : versions)
      for (int64_t i = 0; i < count; ++i) v.push_back(value(rng_));
    return input(versions[0], versions[1]);
  }
  bf16* bf16s(int64_t count) {
    return input<bf16>(count, [](Rng& r) { return to_bf16(normal(r)); });
  }
  float* floats(int64_t count) {
    return input<float>(count, [](Rng& r) { return normal(r); });
  }
  e4m3* codes(int64_t count) {
    return input<e4m3>(count, [](Rng& r) { return to_e4m3(normal(r)); });
  }
  // Numbers of [lo, hi], one in eight hostile.
  int32_t* ints(int64_t count, int64_t lo, int64_t hi) {
    const auto bad = hostile(hi + 1);
    return input<int32_t>(count, [=](Rng& r) {
      return draw(r, 0, 7) == 0 ? bad[draw(r, 0, bad.size() - 1)]
                                : static_cast<int32_t>(draw(r, lo, hi));
    });
  }
  template <class T>
  T* output(int64_t count) {
    Block& b = add(count * sizeof(T));
    b.output = true;
    return static_cast<T*>(b.data);
  }
  std::span<std::byte> workspace(size_t bytes) {
    Block& b = add(bytes);
    b.scratch = true;
    return {static_cast<std::byte*>(b.data), bytes};
  }

  // Inputs of a version; poisoned outputs; a workspace full of `scratch`.
  void load(int version, int scratch = 0xff) const {
    for (const Block& b : blocks_) {
      if (b.output || b.scratch) cudaMemset(b.data, b.output ? 0xcd : scratch, b.bytes);
      else cudaMemcpy(b.data, b.contents[version].data(), b.bytes, cudaMemcpyHostToDevice);
    }
    cudaDeviceSynchronize();
  }
  std::string results() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << name;
    std::string all;
    for (const Block& b : blocks_) {
      if (!b.output) continue;
      std::string bytes(b.bytes, 0);
      cudaMemcpy(bytes.data(), b.data, b.bytes, cudaMemcpyDeviceToHost);
      all += bytes;
    }
    return all;
  }

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
    bool output = false, scratch = false;
    std::string contents[2];
  };
  Block& add(size_t bytes) {
    Block b;
    b.bytes = bytes;
    EXPECT_EQ(cudaMalloc(&b.data, bytes > 0 ? bytes : 1), cudaSuccess);
    blocks_.push_back(std::move(b));
    return blocks_.back();
  }
  std::vector<Block> blocks_;
  Rng rng_{7};
};
using VerbPtr = std::unique_ptr<Verb>;

// A cache whose pages are random bytes that mean finite numbers: codes and exponents without NaN.
inline Cache random_cache(Verb& v, CacheFormat format, int64_t pages, int32_t page) {
  auto* bytes = v.input<uint8_t>(pages * page_bytes(format, page),
                                 [](Rng& r) { return static_cast<uint8_t>(draw(r, 0x30, 0x3e)); });
  return {bytes, format, pages, page};
}

}  // namespace winnow::testing
