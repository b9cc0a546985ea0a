// One call from Python: arguments by name, arrays as views, outputs made where they are missing.
// A binding is a signature (the text that help() and the stubs show, and from which the names are
// taken) and a body that fills a struct of the library from a Call.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "gil.h"
#include "winnow/plan.h"
#include "winnow/precision.h"
#include "winnow/tensor.h"

namespace winnow::python {

// "def attend(q: Array, *, scale: float | None = None) -> Array", taken apart.
struct Signature {
  explicit Signature(const char* text);
  std::string name;
  std::vector<std::string> parameters;
  std::vector<nb::object> keys;  // the same, interned: keywords are found by address
  std::vector<bool> required;
  size_t positional = 0;  // parameters before the "*"
};

// A cache as Python holds it: the view, and the array it looks at.
struct PyCache {
  Cache cache;
  Origin origin;
  bool read_only = false;
  bool may_require_gradient = false;
  nb::object data;
  std::shared_ptr<void> keep;  // as in Array
  nb::object page;             // as given, or None
};

// A plan as Python holds it. The GIL guards what is beside the plan.
struct PyPlan {
  std::shared_ptr<Communicator> ranks;  // that the plan uses, or none
  Plan plan;
  int calls = 0;           // that use the plan at this moment, of any thread
  bool refilling = false;  // by a thread that has let the GIL go

  // Throws while the plan is being refilled; `stage` ("attend") names the reader.
  const Plan& at_rest(const std::string& stage) const;
};

// What an array argument may be read as besides its own dtype.
enum class As : uint8_t { kItself, kE4m3, kMask };

struct Scratch {
  nb::object array;  // that owns it
  std::span<std::byte> memory;
  bool taken = false;  // by a call that is being queued
};

class Call {
 public:
  static constexpr size_t kMost = 56;  // arguments of a function
  Call(const Signature& signature, nb::handle args, nb::handle kwargs);
  // A part of `whole`, of which `prefix` ("norm_write: write[1].") names arguments in messages.
  Call(const Signature& signature, nb::object keywords, const Call& whole, std::string prefix);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // The argument, or a null handle where it is missing or None.
  nb::handle operator[](std::string_view name) const;
  bool given(std::string_view name) const { return (*this)[name].is_valid(); }
  int64_t integer(std::string_view name, int64_t otherwise = 0) const;
  int32_t int32(std::string_view name, int32_t otherwise = 0) const;
  int64_t size(std::string_view name, int64_t otherwise = -1) const;  // >= 0 where it is given
  // `pages`: needed where a block_table is given, since nothing else says where the cache ends.
  int64_t pages_of_table() const;
  double number(std::string_view name) const;  // which must be given
  double number(std::string_view name, double otherwise) const;
  bool flag(std::string_view name, bool otherwise = false) const;
  std::string text(std::string_view name, const char* otherwise = "") const;

  // Host integers: an int32 array on the CPU, or any sequence.
  std::vector<int32_t> integers(std::string_view name);
  // Where to write host integers: `out`, or a new array of this size.
  std::span<int32_t> integers_out(int64_t count);

  // A view; not given: an empty one. Bytes count as e4m3 where requested, bools as bytes in masks.
  Tensor in(std::string_view name, As as = As::kItself);
  Cache cache(std::string_view name, bool writes = false);
  const Plan* plan();  // which no thread can refill before this call's end
  Device device() const { return origin_.current_device(); }  // of the arrays, current stream
  Target target();                                            // the same, and kernel=

  // An output: the caller's array, or a new one of this shape (which must be known by then).
  Tensor out(std::string_view name, DType dtype, std::initializer_list<int64_t> shape);
  // A size that an argument names and that an output has: where both are given, they agree.
  void agree(std::string_view name, int64_t size, const Tensor& out, int dimension) const;
  // Whether an optional output (`lse: Array | bool = False`) is requested.
  bool wanted(std::string_view name) const;
  // Memory of the caller's library, for this call alone.
  std::span<std::byte> scratch(size_t bytes);
  // The caller's workspace= array, or scratch.
  std::span<std::byte> workspace(size_t bytes);
  // An array of bytes that is given, to be written.
  std::span<std::byte> bytes(std::string_view name);

  // Runs the library without the GIL.
  template <class F>
  void run(F&& body) {
    without_gil(body);
  }

  // For calls of several functions in one: `name` is a dict with arguments of the function `of`, or
  // a sequence of at most `most` of them. `fill` takes each as a Call of its own, on this one's
  // device, and its index; what the part writes belongs to this call's results.
  template <class F>
  void parts(std::string_view name, std::string_view of, size_t most, F&& fill) {
    const size_t count = open_parts(name, of, most);
    for (size_t i = 0; i < count; ++i) {
      Call& part = open_part(name, of, i);
      fill(part, i);
      close_part(part);
    }
  }

  // The output, or a tuple of those that were made or given.
  nb::object result(std::initializer_list<std::string_view> names) const;

  [[noreturn]] void fail(std::string_view name, const std::string& expected,
                         const std::string& found) const;
  [[noreturn]] void wrong_type(std::string_view name, const char* expected) const;

 private:
  struct Output {
    std::string_view name;
    nb::object object;
  };
  std::string what(std::string_view name) const;
  void take(nb::handle keywords);
  void check_required() const;
  size_t open_parts(std::string_view name, std::string_view of, size_t most);
  Call& open_part(std::string_view name, std::string_view of, size_t i);
  void close_part(Call& part);
  // Of an argument that is given.
  Array array(std::string_view name, As as = As::kItself);
  void same_device(std::string_view name, const Origin& origin);

  const Signature& signature_;
  std::string prefix_;  // of arguments' names in messages: "attend: "
  PyObject* values_[kMost] = {};
  nb::object keywords_;  // of a part: a copy, which no other thread can change
  Origin origin_;
  bool has_origin_ = false;
  std::string kernel_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<Output> outputs_;
  Scratch scratch_;
  Scratch* taken_ = nullptr;
  PyPlan* plan_ = nullptr;
  std::vector<nb::object> dicts_;  // of the parts to come
  std::vector<std::unique_ptr<Call>> parts_;
};

// A str in UTF-8. Throws for a lone surrogate.
std::string utf8(nb::handle text);

// The argument `precision`: "full" or "fp8".
Precision precision_of(const Call& c);

using Body = nb::object (*)(Call&);
void def(nb::module_& m, const char* signature, Body body, const char* doc);

// One per file of bindings.
void bind_model(nb::module_& m);
void bind_planning(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_fused(nb::module_& m);
void bind_write(nb::module_& m);
void bind_score(nb::module_& m);
void bind_ranks(nb::module_& m);
void bind_attend(nb::module_& m);
void bind_lists(nb::module_& m);
void bind_absorb(nb::module_& m);
void bind_pipeline(nb::module_& m);

}  // namespace winnow::python
