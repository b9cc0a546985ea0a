// What the stage tests share: guarded buffers, kernels from the tables, seeded random numbers.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if defined(__has_feature)  // Clang's way of saying so; GCC defines a macro
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "core/arithmetic.h"
#include "machine.h"
#include "memory.h"
#include "winnow/error.h"
#include "winnow/support.h"
#include "winnow/tensor.h"

namespace winnow::testing {

// A buffer between guard bytes, poisoned before use. Destruction checks the guards. Memory that a
// checker of the device watches (memory.h) has none: its own bounds are the guard.
template <class T>
class Guarded {
 public:
  using Value = T;
  static constexpr uint8_t kPoison = 0xcd, kFence = 0xa5;

  explicit Guarded(size_t count, uint8_t with = kPoison)
      : count_(count),
        guard_(exact_allocations ? 0 : 256),
        total_(exact_allocations ? count * sizeof(T)
                                 : round_up(count * sizeof(T) + 2 * guard_, 64)),
        bytes_(static_cast<uint8_t*>(allocate(exact_allocations ? total_ : total_ + 64))) {
    first_ = bytes_ + (64 - reinterpret_cast<uintptr_t>(bytes_) % 64) % 64;
    std::memset(first_, kFence, total_);
    poison(with);
    guard(true);
  }
  Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    if (!values.empty()) std::memcpy(data(), values.data(), values.size() * sizeof(T));
  }
  Guarded(const Guarded& other) : Guarded(other.count_) {
    std::memcpy(data(), other.data(), count_ * sizeof(T));
  }
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    EXPECT_TRUE(device_finished());
    check();
    guard(false);
    release(bytes_);
  }

  void check() const {
    guard(false);
    for (size_t i = 0; i < total_; ++i)
      if ((i < guard_ || i >= guard_ + count_ * sizeof(T)) && first_[i] != kFence) {
        ADD_FAILURE() << "written outside the buffer, at byte "
                      << static_cast<int64_t>(i) - static_cast<int64_t>(guard_) << " of "
                      << count_ * sizeof(T);
        break;
      }
    guard(true);
  }

  void poison(uint8_t with = kPoison) { std::memset(first_ + guard_, with, count_ * sizeof(T)); }
  T* data() { return reinterpret_cast<T*>(first_ + guard_); }
  const T* data() const { return reinterpret_cast<const T*>(first_ + guard_); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }
  std::vector<T> values() const { return std::vector<T>(data(), data() + count_); }

 private:
  // Under AddressSanitizer reading the guards is an error as well.
  void guard([[maybe_unused]] bool on) const {
#ifdef __SANITIZE_ADDRESS__
    const uint8_t* behind = first_ + guard_ + count_ * sizeof(T);
    const size_t rest = total_ - guard_ - count_ * sizeof(T);
    if (on) {
      ASAN_POISON_MEMORY_REGION(first_, guard_);
      ASAN_POISON_MEMORY_REGION(behind, rest);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(first_, total_);
    }
#endif
  }

  size_t count_, guard_, total_;
  uint8_t* bytes_;            // as allocated
  uint8_t* first_ = nullptr;  // aligned to 64: guard, data, guard
};

// The kernels of a family, "sm90/wide" and "sm90/decode", go by its name, "sm90": it serves every
// case, each by the kernel that the library chooses.
inline std::string family(const std::string& kernel) { return kernel.substr(0, kernel.find('/')); }

// Every kernel of a stage's table, families as one, on any device, the reference last.
inline std::vector<std::string> kernels(const std::string& stage) {
  std::vector<std::string> names;
  for (const KernelInfo& k : support())
    if (k.stage == stage && (names.empty() || names.back() != family(k.kernel)))
      names.push_back(family(k.kernel));
  return names;
}

// The kernels of a stage that are one of a family: each serves the cases that its table says.
inline std::vector<std::string> members(const std::string& stage) {
  std::vector<std::string> names;
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.kernel != family(k.kernel)) names.push_back(k.kernel);
  return names;
}

// A kernel's name as part of a test's.
inline std::string label(std::string kernel) {
  for (char& c : kernel)
    if (c == '/' || c == '+') c = '_';
  return kernel;
}

// The target that runs this kernel, or one of this family, on its device.
inline Target target(const std::string& stage, const std::string& kernel) {
  for (const KernelInfo& k : support())
    if (k.stage == stage && (k.kernel == kernel || family(k.kernel) == kernel) &&
        k.device == "cuda")
      return {.device = cuda(), .kernel = kernel.c_str()};
  return {.kernel = kernel.c_str()};
}

// The CPU kernels of a stage's table, the reference last.
inline std::vector<std::string> cpu_kernels(const std::string& stage) {
  std::vector<std::string> names;
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.device == "cpu") names.push_back(k.kernel);
  return names;
}

// "" if the kernel can run here, else the reason, for GTEST_SKIP. A kernel that this machine should
// run fails the test.
inline std::string why_not(const std::string& stage, const std::string& kernel) {
  for (const KernelInfo& k : support())
    if (k.stage == stage && (k.kernel == kernel || family(k.kernel) == kernel))
      return allowed_skip(k.reason, should_run(kernel));
  return allowed_skip("no such kernel in this build", should_run(kernel));
}

// Whether a kernel of score, or a family, reads index keys in bf16: those of single instruction
// sets read e4m3 alone.
inline bool reads_bf16_keys(const std::string& kernel) {
  return kernel != "amx" && kernel != "avx512bf16";
}

// Indices that must never be dereferenced, for a range of `length` valid ones.
inline std::array<int32_t, 7> hostile(int64_t length) {
  return {INT32_MIN, INT32_MIN + 1, -2, -1, static_cast<int32_t>(length), INT32_MAX, INT32_MAX - 1};
}

using Rng = std::mt19937_64;
inline int64_t draw(Rng& rng, int64_t lo, int64_t hi) {
  return std::uniform_int_distribution<int64_t>(lo, hi)(rng);
}
inline float normal(Rng& rng) { return std::normal_distribution<float>()(rng); }

// Runs `statement` and checks that it throws winnow::Error, of this code, with every word given in
// its message.
template <class F>
void expect_error(F&& statement, ErrorCode code, std::initializer_list<const char*> words) {
  try {
    statement();
    ADD_FAILURE() << "expected winnow::Error";
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.code()), static_cast<int>(code)) << e.what();
    for (const char* w : words)
      EXPECT_NE(std::string(e.what()).find(w), std::string::npos)
          << "'" << w << "' is not in: " << e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "expected winnow::Error, found another exception: " << e.what();
  }
}
template <class F>
void expect_invalid(F&& statement, std::initializer_list<const char*> words) {
  expect_error(statement, ErrorCode::kInvalidArgument, words);
}

}  // namespace winnow::testing
