// What the stage tests share: guarded buffers, kernels from the tables, seeded random numbers.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "winnow/support.h"
#include "winnow/tensor.h"

namespace winnow::testing {

// A buffer between guard bytes, poisoned before use. Destruction checks the guards.
template <class T>
class Guarded {
 public:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kPoison = 0xcd, kFence = 0xa5;

  explicit Guarded(size_t count, uint8_t poison = kPoison)
      : count_(count), bytes_(count * sizeof(T) + 2 * kGuard + 64, kFence) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data()) + kGuard;
    offset_ = (address + 63) / 64 * 64 - reinterpret_cast<uintptr_t>(bytes_.data());
    std::memset(bytes_.data() + offset_, poison, count * sizeof(T));
  }
  Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    if (!values.empty()) std::memcpy(data(), values.data(), values.size() * sizeof(T));
  }
  Guarded(const Guarded& other) : Guarded(other.count_) {
    std::memcpy(data(), other.data(), count_ * sizeof(T));
  }
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { check(); }

  void check() const {
    for (size_t i = 0; i < bytes_.size(); ++i)
      if ((i < offset_ || i >= offset_ + count_ * sizeof(T)) && bytes_[i] != kFence) {
        ADD_FAILURE() << "written outside the buffer, at byte "
                      << static_cast<int64_t>(i) - static_cast<int64_t>(offset_) << " of "
                      << count_ * sizeof(T);
        return;
      }
  }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + offset_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + offset_); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }
  std::vector<T> values() const { return std::vector<T>(data(), data() + count_); }

 private:
  size_t count_, offset_ = 0;
  std::vector<uint8_t> bytes_;
};

// The CPU kernels of a stage's table, the reference last.
inline std::vector<std::string> cpu_kernels(const std::string& stage) {
  std::vector<std::string> names;
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.device == "cpu") names.push_back(k.kernel);
  return names;
}

// "" if the kernel can run here, else the reason, for GTEST_SKIP.
inline std::string why_not(const std::string& stage, const std::string& kernel) {
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.kernel == kernel && k.device == "cpu") return k.reason;
  return "no such kernel";
}

// Indices that must never be dereferenced, for a range of `length` valid ones.
inline std::vector<int32_t> hostile(int64_t length) {
  return {INT32_MIN, INT32_MIN + 1, -2, -1, static_cast<int32_t>(length), INT32_MAX, INT32_MAX - 1};
}

using Rng = std::mt19937_64;
inline int64_t draw(Rng& rng, int64_t lo, int64_t hi) {
  return std::uniform_int_distribution<int64_t>(lo, hi)(rng);
}
inline float normal(Rng& rng) { return std::normal_distribution<float>()(rng); }

// Runs `statement` and checks that it throws winnow::Error whose message contains every word given.
template <class F>
void expect_error(F&& statement, std::initializer_list<const char*> words) {
  try {
    statement();
    ADD_FAILURE() << "expected winnow::Error";
  } catch (const std::exception& e) {
    for (const char* w : words)
      EXPECT_NE(std::string(e.what()).find(w), std::string::npos)
          << "'" << w << "' is not in: " << e.what();
  }
}

}  // namespace winnow::testing
