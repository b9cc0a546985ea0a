// What the C functions share: the guard that turns exceptions into a status, and the way in for
// views. Values a C caller can get wrong that the C++ types rule out (null structs, sizes, ranks,
// enumerators) are checked here; everything else is the stage's own business.
#pragma once

#include <cstddef>
#include <span>

#include "core/check.h"
#include "winnow/plan.h"
#include "winnow/tensor.h"
#include "winnow/winnow_c.h"

struct winnow_plan {
  winnow::Plan plan;
};

namespace winnow::internal::c_api {

// Views of one call; names stage and argument when one is not a view at all.
class In {
 public:
  explicit In(const char* stage) : check_(stage) {}

  Tensor operator()(const winnow_tensor& t, const char* argument) const;
  Cache operator()(const winnow_cache& c, const char* argument) const;
  Target operator()(const winnow_target& t) const;
  std::span<const int32_t> operator()(const winnow_ints& v, const char* argument) const;
  // `count` values to be written at `out`.
  template <class T>
  std::span<T> out(T* out, int64_t count, const char* argument) const {
    check_.range(count, argument, 0, INT64_MAX / static_cast<int64_t>(sizeof(T)));
    check_.that(out != nullptr || count == 0, argument, "data", "a null pointer");
    return {out, static_cast<size_t>(count)};
  }
  // An enumerator, by its number; `last` is the largest. The name is put together only to fail.
  template <class E>
  E choice(int32_t value, const char* argument, E last, const char* member = "") const {
    if (value < 0 || value > static_cast<int32_t>(last))
      check_.range(value, std::string(cat(argument, member)).c_str(), 0,
                   static_cast<int32_t>(last));
    return static_cast<E>(value);
  }
  template <class T>
  T& given(T* pointer, const char* argument) const {
    check_.that(pointer != nullptr, argument, "a pointer", "null");
    return *pointer;
  }
  template <class T>
  const T& sized(const T* args, const char* name = "args") const {
    given(args, name);
    check_.that(args->struct_size == sizeof(T), "struct_size", cat(sizeof(T)),
                cat(args->struct_size));
    return *args;
  }
  static const Plan* plan(const winnow_plan* p) { return p ? &p->plan : nullptr; }
  static std::span<std::byte> bytes(void* data, size_t size) {
    return {static_cast<std::byte*>(data), data ? size : 0};
  }
  const Check& check() const { return check_; }

 private:
  Check check_;
};

// The one place where exceptions end: keeps the message of the current one for this thread.
winnow_status failed() noexcept;

// Runs body(In), or records why it could not.
template <class F>
winnow_status guarded(const char* stage, F&& body) noexcept {
  try {
    body(In(stage));
    return WINNOW_OK;
  } catch (...) {
    return failed();
  }
}

// The same for calls of one argument struct: body(args, In).
template <class T, class F>
winnow_status guarded(const char* stage, const T* args, F&& body) noexcept {
  return guarded(stage, [&](const In& in) { body(in.sized(args), in); });
}

}  // namespace winnow::internal::c_api
