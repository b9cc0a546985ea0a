// Calls that are damaged at random, and what must hold for them: an Error that names its stage and
// leaves every output as it was, or success; never a byte outside the buffers, never a changed
// input. A subject is one verb with small, correct arguments; it registers what can be damaged.
//
// The library cannot know how long a caller's memory is. So a dimension that nothing else in the
// call pins down (Unpinned) is made smaller, zero or negative, but not larger, and strides never
// grow to a value that is legal.
#pragma once

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "testing.h"
#include "winnow/winnow.h"

namespace winnow::testing {

// A tensor some of whose dimensions nothing else in the call pins down: bit i for dimension i.
struct Unpinned {
  Tensor& tensor;
  unsigned dims;
};
inline Unpinned unpinned(Tensor& tensor, unsigned dims) { return {tensor, dims}; }

class Subject {
 public:
  Subject(std::vector<const char*> stages, uint64_t seed)
      : stages_(std::move(stages)), rng_(seed) {}

  Rng& rng() { return rng_; }
  std::function<void()> call;

  // Memory of the call. It is a little longer than requested: a view that is moved by a byte or two
  // is the caller's to give.
  template <class T>
  T* memory(int64_t count, bool output = false) {
    buffers_.push_back({std::make_unique<Guarded<uint8_t>>(count * sizeof(T) + 16, 0), output});
    return reinterpret_cast<T*>(buffers_.back().bytes->data());
  }
  template <class T>
  Tensor input(std::initializer_list<int64_t> shape, int64_t byte = 0x3c) {
    Tensor t = tensor(static_cast<T*>(nullptr), shape);
    T* data = memory<T>(t.size());
    std::memset(static_cast<void*>(data), static_cast<int>(byte), t.size() * sizeof(T));
    t.data = data;
    return t;
  }
  // Numbers in [lo, hi], some of them hostile.
  template <class T>
  Tensor numbers(std::initializer_list<int64_t> shape, int64_t lo, int64_t hi) {
    Tensor t = input<T>(shape);
    const auto bad = hostile(hi + 1);
    const bool damaged = draw(rng_, 0, 2) == 0;
    for (int64_t i = 0; i < t.size(); ++i)
      static_cast<T*>(t.data)[i] =
          static_cast<T>(damaged && draw(rng_, 0, 3) == 0 ? bad[draw(rng_, 0, bad.size() - 1)]
                                                          : draw(rng_, lo, hi));
    return t;
  }
  template <class T>
  Tensor output(std::initializer_list<int64_t> shape) {
    Tensor t = tensor(static_cast<T*>(nullptr), shape);
    T* data = memory<T>(t.size(), true);
    std::memset(static_cast<void*>(data), 0xcd, t.size() * sizeof(T));
    t.data = data;
    return t;
  }
  Cache cache(CacheFormat format, int64_t pages, int32_t page, bool written = false) {
    const int64_t stride = page_bytes(format, page);
    auto* data = memory<std::byte>(pages * stride, written);
    std::memset(data, 0x38, pages * stride);
    return {.data = data, .format = format, .pages = pages, .page = page, .page_stride = stride};
  }

  // Places that can be damaged.
  template <class... Places>
  void damages(Places&&... places) {
    (add(places), ...);
  }

  // Damages up to three places, calls, and checks what must hold. True if the call succeeded.
  bool run() {
    grown_ = false;
    for (int64_t n = draw(rng_, 0, 3); n > 0; --n)
      targets_[draw(rng_, 0, std::ssize(targets_) - 1)]();
    std::vector<std::vector<uint8_t>> before;
    for (const Buffer& b : buffers_) before.push_back(b.bytes->values());
    bool succeeded = false;
    try {
      call();
      succeeded = true;
    } catch (const Error& e) {
      const int code = static_cast<int>(e.code());
      EXPECT_TRUE(code >= 1 && code <= 3) << e.what();
      EXPECT_TRUE(names_a_stage(e.what())) << e.what();
    } catch (const std::exception& e) {
      ADD_FAILURE() << stages_[0] << ": not a winnow::Error: " << e.what();
    }
    for (size_t i = 0; i < buffers_.size(); ++i) {
      buffers_[i].bytes->check();
      if (succeeded && buffers_[i].output) continue;
      EXPECT_TRUE(buffers_[i].bytes->values() == before[i])
          << stages_[0] << ": buffer " << i << " was written, the call "
          << (succeeded ? "succeeded" : "failed");
    }
    return succeeded;
  }

 private:
  void add(Tensor& t) { add({t, 0}); }
  void add(const Unpinned& u) {
    targets_.push_back([u, this] { damage(u.tensor, u.dims); });
  }
  void add(Cache& c) {
    targets_.push_back([&c, this] { damage(c); });
  }
  void add(Target& t) {
    targets_.push_back([&t, this] { damage(t); });
  }
  void add(std::span<std::byte>& workspace) {
    targets_.push_back([&workspace, this] {
      const size_t sizes[] = {0, workspace.size() / 2, workspace.size()};
      workspace = {draw(rng_, 0, 1) ? workspace.data() : nullptr, sizes[draw(rng_, 0, 2)]};
    });
  }
  template <class T>
  void add(T& number) requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    targets_.push_back([&number, this] {
      const T values[] = {0, static_cast<T>(-1), std::numeric_limits<T>::min(),
                          std::numeric_limits<T>::max(), one_less(number)};
      number = values[draw(rng_, 0, 4)];
    });
  }
  template <class T>
  void add(T& number) requires std::is_floating_point_v<T> {
    targets_.push_back([&number, this] {
      const T values[] = {0, -1, NAN, INFINITY, -INFINITY, static_cast<T>(1e38)};
      number = values[draw(rng_, 0, 5)];
    });
  }
  template <class E>
  void add(E& value) requires std::is_enum_v<E> {
    targets_.push_back([&value, this] { value = static_cast<E>(draw(rng_, 0, 255)); });
  }

  struct Buffer {
    std::unique_ptr<Guarded<uint8_t>> bytes;
    bool output;
  };

  bool names_a_stage(const std::string& message) const {
    for (const char* stage : stages_)
      if (message.starts_with(std::string(stage) + ": ")) return true;
    return false;
  }
  // Of a number that may be damaged already.
  template <class T>
  static T one_less(T number) {
    return number == std::numeric_limits<T>::min() ? number : static_cast<T>(number - 1);
  }
  int64_t pick(std::initializer_list<int64_t> values) {
    return values.begin()[draw(rng_, 0, std::ssize(values) - 1)];
  }

  void damage(Tensor& t, unsigned free) {
    const int dim = static_cast<int>(draw(rng_, 0, 3));
    switch (draw(rng_, 0, 6)) {
      case 0: t.data = nullptr; break;
      case 1: t.data = static_cast<std::byte*>(t.data) + (t.data ? 1 : 0); break;
      // Where two types are allowed the memory holds the larger one.
      case 2: t.dtype = static_cast<DType>(pick({0, 1, 5, 6, 99, 255})); break;
      case 3: t.rank = static_cast<int>(pick({-1, 0, 1, 2, 3, 4, 5, INT32_MAX, INT32_MIN})); break;
      case 4: {
        // One dimension of a call may grow: two that agree would be a call for more memory.
        const bool may_grow = !(free >> dim & 1) && !grown_;
        const int64_t n = t.shape[dim];
        t.shape[dim] = may_grow ? pick({-1, INT64_MIN, 0, one_less(n), n + 1, INT64_MAX, 1 << 20})
                                : pick({-1, INT64_MIN, 0, one_less(n)});
        grown_ |= t.shape[dim] > n;
        break;
      }
      case 5: t.stride[dim] = pick({-1, INT64_MIN, 0, one_less(t.stride[dim]), INT64_MAX}); break;
      default: t = {}; break;
    }
  }
  void damage(Cache& c) {
    switch (draw(rng_, 0, 5)) {
      case 0: c.data = nullptr; break;
      case 1: c.data = static_cast<std::byte*>(c.data) + (c.data ? 1 : 0); break;
      case 2: c.format = static_cast<CacheFormat>(draw(rng_, 0, 7)); break;
      case 3: c.pages = pick({0, -1, one_less(c.pages), INT64_MAX, INT64_MIN}); break;
      case 4:
        c.page = static_cast<int32_t>(pick({0, -1, one_less(c.page), INT32_MIN, INT32_MAX}));
        break;
      default: c.page_stride = pick({-1, one_less(c.page_stride), 16, INT64_MIN}); break;
    }
  }
  void damage(Target& t) {
    static const char* const names[] = {"", "nothing", "reference", "simd"};
    if (draw(rng_, 0, 1)) t.device.kind = static_cast<DeviceKind>(draw(rng_, 1, 255));
    else t.kernel = names[draw(rng_, 0, 3)];
  }

  std::vector<const char*> stages_;
  Rng rng_;
  std::vector<Buffer> buffers_;
  std::vector<std::function<void()>> targets_;
  bool grown_ = false;
};

// Arguments that live as long as the call, which holds them.
template <class Args, class F>
std::shared_ptr<Args> calls(Subject& s, Args args, F&& verb) {
  auto held = std::make_shared<Args>(std::move(args));
  s.call = [held, verb] { verb(*held); };
  return held;
}

// A verb by name, the stages that its messages may name, and how its arguments are made.
struct Verb {
  const char* name;
  std::vector<const char*> stages;
  std::shared_ptr<void> (*make)(Subject&);
};

// Damages and calls a verb as often as WINNOW_HOSTILE_ROUNDS says.
inline void sweep(const Verb& verb) {
  const char* rounds_asked = std::getenv("WINNOW_HOSTILE_ROUNDS");
  const char* seed_asked = std::getenv("WINNOW_HOSTILE_SEED");
  const int64_t rounds = rounds_asked ? std::atoll(rounds_asked) : 400;
  const uint64_t seed = seed_asked ? std::strtoull(seed_asked, nullptr, 10) : 1;
  int64_t succeeded = 0;
  for (int64_t i = 0; i < rounds; ++i) {
    Subject subject(verb.stages, seed * 1000003 + i);
    const std::shared_ptr<void> args = verb.make(subject);
    succeeded += subject.run();
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "round " << i << " of seed " << seed;
      return;
    }
  }
  // Both kinds are there, or the sweep sees one half of the contract only.
  EXPECT_GT(succeeded, rounds / 20);
  EXPECT_LT(succeeded, rounds - rounds / 20);
}

}  // namespace winnow::testing
