// Validation: every message reads "stage: argument: expected ..., found ...".
#pragma once

#include <cstddef>
#include <initializer_list>
#include <new>
#include <span>
#include <sstream>
#include <string>
#include <tuple>

#include "core/namespaces.h"
#include "winnow/error.h"
#include "winnow/tensor.h"

namespace winnow::internal::core {

// Parts of a message, put together only when it is read as a std::string: a check that passes
// builds nothing. Holds references, so it must not outlive its expression.
template <class... Parts>
struct Text {
  std::tuple<const Parts&...> parts;
  operator std::string() const {
    std::ostringstream s;
    std::apply([&](const auto&... part) { (s << ... << part); }, parts);
    return s.str();
  }
};
template <class... Parts>
Text<Parts...> cat(const Parts&... parts) {
  return {{parts...}};
}

// Ends a public function that got std::bad_alloc, with Error(kRuntime): callers of the library see
// one exception. Each of them that may allocate, if only for a message, ends with
//   } catch (const std::bad_alloc&) {
//     out_of_memory("stage");
//   }
[[noreturn]] void out_of_memory(const char* stage);

// The bytes of a cache's pages, for Check::apart(); nothing of none.
Tensor pages_view(const Cache& cache);

std::string shape_of(const Tensor& t);  // "[4, 16, 576] bf16"
const char* name_of(DType dtype);

// Checks of one call; remembers the stage's name for the messages, and of a part of a fused call
// what its arguments' names begin with ("write[1].").
class Check {
 public:
  explicit Check(const char* stage, const char* part = "") : stage_(stage), part_(part) {}

  [[noreturn]] void fail(const char* argument, const std::string& expected,
                         const std::string& found) const;
  // `expected` and `found`: strings, or a cat() of parts.
  template <class Expected, class Found>
  void that(bool ok, const char* argument, const Expected& expected, const Found& found) const {
    if (!ok) fail(argument, expected, found);
  }
  // lo <= value <= hi, and returns it.
  int64_t range(int64_t value, const char* argument, int64_t lo, int64_t hi) const;

  // An enumerator that its type has; `last` is the largest.
  template <class E>
  void choice(E value, const char* argument, E last) const {
    range(static_cast<int64_t>(value), argument, 0, static_cast<int64_t>(last));
  }

  // A given tensor of this dtype and shape (-1 matches any size), innermost dimension contiguous,
  // data aligned and not null unless empty, strides not negative, extent within 64 bits.
  static constexpr int64_t kAny = -1;
  void tensor(const Tensor& t, const char* argument, DType dtype,
              std::initializer_list<int64_t> shape) const;
  // The same, where a missing tensor is fine; true if it is given.
  bool optional(const Tensor& t, const char* argument, DType dtype,
                std::initializer_list<int64_t> shape) const;
  // Any strides, innermost included.
  void strided(const Tensor& t, const char* argument, DType dtype,
               std::initializer_list<int64_t> shape) const;
  // An output: as strided(), and no two elements share an address.
  void output(const Tensor& t, const char* argument, DType dtype,
              std::initializer_list<int64_t> shape) const;
  // An output whose innermost dimension is contiguous: as tensor() and output().
  void output_rows(const Tensor& t, const char* argument, DType dtype,
                   std::initializer_list<int64_t> shape) const;

  // Outputs share no byte with each other, nor with an input, unless the header allows an output
  // to be that very input (`may_be`, the output): then all of its elements lie where the input's
  // do. Missing and empty tensors are apart from everything. Every tensor was checked before, and
  // there are at most kMostOutputs outputs. Cost: a few comparisons.
  struct Named {
    const Tensor& view;
    const char* name;
    const Tensor* may_be = nullptr;
  };
  static constexpr int kMostOutputs = 4;
  // A view that the call reads, or nothing: what it does not read was not checked.
  static const Tensor& read(bool used, const Tensor& view) {
    static constexpr Tensor kNothing;
    return used ? view : kNothing;
  }
  static const Tensor& read(bool used, Tensor&& view) = delete;
  void apart(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const;

  // CUDA: [tokens, heads, ...] bf16 whose rows, read and written 16 bytes at a time, begin at
  // multiples of 16; nothing and empty tensors are fine.
  void rows_of_16(const Tensor& t, const char* argument) const;

  // A cache whose pages fit its stride; returns it with the stride resolved. Slots must fit int32
  // when `slots32` (index tensors are int32). Pages begin at multiples of 16 bytes on CUDA (index
  // keys: 4), where they are read 16 bytes at a time; on the CPU at multiples of their largest
  // element.
  struct CacheUse {
    DeviceKind device;
    bool slots32;
  };
  Cache cache(const Cache& c, const char* argument, CacheUse use) const;

  // A scale of logits that the caller gave.
  void scale(float value) const;

  // A workspace of at least `bytes` bytes; an empty one is fine where none are needed.
  void workspace(std::span<const std::byte> given, size_t bytes) const;

  // The pages of a cache that a block table points into. None is a forgotten argument where the
  // table has entries: it would turn every slot into -1.
  void pages(int64_t pages, const Tensor& block_table, int64_t most) const;

  const char* stage() const { return stage_; }

 private:
  void layout(const Tensor& t, const char* argument, DType dtype,
              std::initializer_list<int64_t> shape, bool contiguous) const;
  const char* stage_;
  const char* part_;
};

}  // namespace winnow::internal::core
