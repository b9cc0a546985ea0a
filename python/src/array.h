// Arrays of any library as winnow's views, and new arrays in the library of an old one. Nothing is
// copied: a view holds the array's own pointer and strides.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <span>
#include <string>

#include "dlpack_exchange.h"
#include "winnow/tensor.h"

namespace winnow::python {

// How arrays of one Python type are read. Found once per type.
enum class Library : uint8_t { kExchange, kTorch, kNumpy, kCuda, kDlpack, kNone };

// The library and device of an array: where results of a call are made and on which stream it runs.
struct Origin {
  Library library = Library::kNone;
  const DlpackExchange* exchange = nullptr;
  DeviceKind device = DeviceKind::kCpu;
  int index = 0;

  Device current_device() const;  // with the library's current stream
};

struct Array {
  Tensor tensor;
  Origin origin;
  bool read_only = false;
  bool is_bool = false;               // the tensor is uint8 then: what masks may be, and no others
  const char* other_dtype = nullptr;  // set when the dtype is none of winnow's; tensor is unusable
  std::shared_ptr<void> keep;         // what owns the view, where that is not the array itself
};

// The view of an array object. Throws nb::type_error if it is none; `what` ("attend: q") names it.
Array view_of(nb::handle object, const std::string& what);
// Whether arrays of this library and dtype can require gradients.
bool may_require_gradient(const Origin& origin, DType dtype);
// Throws for a tensor whose gradient the call would lose: one that requires it, in grad mode.
void refuse_gradient(nb::handle object, const std::string& what);
// Throws where this build cannot use an array, or a plan, on a CUDA device.
void require_cuda_build(int index, const std::string& what);
// Whether an object is an array at all (a tensor, not a bool or None).
bool is_array(nb::handle object);

// A new array of the caller's library. NumPy gets ml_dtypes' bfloat16 and float8_e4m3fn, or uint16
// and uint8 where ml_dtypes is missing.
nb::object empty_like(const Origin& origin, DType dtype, std::span<const int64_t> shape);

std::string device_name(DeviceKind kind, int index);  // "cpu", "cuda:0"
const char* dtype_name(DType dtype);                  // "bfloat16", as torch and NumPy say it

}  // namespace winnow::python
