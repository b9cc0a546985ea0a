#include "array.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "gil.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::python {

namespace {

constexpr int32_t kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13;

struct TypeInfo {
  Library library = Library::kNone;
  const DlpackExchange* exchange = nullptr;
  bool dispatches = false;  // a torch.Tensor with operators of its own, which may have no memory
};

bool has(nb::handle type, const char* name) { return PyObject_HasAttrString(type.ptr(), name); }

bool dispatches(nb::handle type) {
  const nb::object own = nb::getattr(type, "__torch_dispatch__", nb::none());
  return !own.is_none() &&
         !own.is(nb::module_::import_("torch").attr("Tensor").attr("__torch_dispatch__"));
}

TypeInfo inspect(nb::handle type) {
  if (nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
      PyCapsule_CheckExact(capsule.ptr())) {
    void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (!table) PyErr_Clear();
    auto* exchange = static_cast<const DlpackExchange*>(table);
    while (exchange && exchange->version.major != 1) exchange = exchange->previous;
    if (exchange && exchange->view_of_object)
      return {Library::kExchange, exchange, dispatches(type)};
  }
  const std::string module =
      nb::cast<std::string>(nb::str(nb::getattr(type, "__module__", nb::str())));
  if (module.rfind("torch", 0) == 0 && has(type, "data_ptr"))
    return {Library::kTorch, nullptr, dispatches(type)};
  if (has(type, "filled") && has(type, "mask")) return {};  // NumPy's masks would be left out
  if (has(type, "__array_interface__") && has(type, "dtype")) return {Library::kNumpy};
  // JAX's arrays have the CUDA interface on any device, and are not to be written.
  if (has(type, "__cuda_array_interface__") && module.rfind("jax", 0) != 0) return {Library::kCuda};
  if (has(type, "__dlpack__")) return {Library::kDlpack};
  return {};
}

// Types live as long as the process here: the map keeps a reference, so an address is never reused.
const TypeInfo& info_of(nb::handle object) {
  static auto* known = new std::unordered_map<PyTypeObject*, TypeInfo>();
  PyTypeObject* type = Py_TYPE(object.ptr());
  const auto found = known->find(type);
  if (found != known->end()) return found->second;
  Py_INCREF(type);
  return known->emplace(type, inspect(nb::handle(reinterpret_cast<PyObject*>(type)))).first->second;
}

struct NamedDtype {
  const char* name;
  DType dtype;
  nb::dlpack::dtype code;
};
using Code = nb::dlpack::dtype_code;
constexpr NamedDtype kDtypes[] = {
    {"bfloat16", DType::kBf16, {uint8_t(Code::Bfloat), 16, 1}},
    {"float8_e4m3fn", DType::kE4m3, {uint8_t(Code::Float8_E4M3FN), 8, 1}},
    {"float32", DType::kF32, {uint8_t(Code::Float), 32, 1}},
    {"int32", DType::kI32, {uint8_t(Code::Int), 32, 1}},
    {"int64", DType::kI64, {uint8_t(Code::Int), 64, 1}},
    {"uint8", DType::kU8, {uint8_t(Code::UInt), 8, 1}},
    // Read as something else: masks, and bits of bf16 where no library has the type.
    {"bool", DType::kU8, {uint8_t(Code::Bool), 8, 1}},
    {"uint16", DType::kBf16, {uint8_t(Code::UInt), 16, 1}},
};
constexpr NamedDtype kOthers[] = {
    {"float16", DType::kU8, {uint8_t(Code::Float), 16, 1}},
    {"float64", DType::kU8, {uint8_t(Code::Float), 64, 1}},
    {"int8", DType::kU8, {uint8_t(Code::Int), 8, 1}},
    {"int16", DType::kU8, {uint8_t(Code::Int), 16, 1}},
    {"uint32", DType::kU8, {uint8_t(Code::UInt), 32, 1}},
};

void set_dtype(Array& a, const nb::dlpack::dtype& code) {
  a.is_bool = code.code == uint8_t(Code::Bool);
  for (const NamedDtype& d : kDtypes)
    if (d.code == code) {
      a.tensor.dtype = d.dtype;
      return;
    }
  a.other_dtype = "another dtype";
  for (const NamedDtype& d : kOthers)
    if (d.code == code) a.other_dtype = d.name;
}

void set_dtype(Array& a, const std::string& name) {
  a.is_bool = name == "bool";
  for (const NamedDtype& d : kDtypes)
    if (name == d.name) {
      a.tensor.dtype = d.dtype;
      return;
    }
  a.other_dtype = "another dtype";
  for (const NamedDtype& d : kOthers)
    if (name == d.name) a.other_dtype = d.name;
}

// A scalar would count as "not given".
void set_rank(Array& a, int64_t rank, const std::string& what) {
  if (rank < 1 || rank > 4)
    throw Error(ErrorCode::kInvalidArgument,
                what + ": expected 1 to 4 dimensions, found " + std::to_string(rank));
  a.tensor.rank = static_cast<int>(rank);
}

void set_device(Array& a, int32_t type, int32_t index, const std::string& what) {
  if (type == kDlCuda || type == kDlCudaManaged) {
    require_cuda_build(index, what);
    a.origin.device = DeviceKind::kCuda;
    a.origin.index = index;
  } else if (type != kDlCpu && type != kDlCudaHost) {
    throw Error(
        ErrorCode::kInvalidArgument,
        what + ": expected a CPU or CUDA array, found DLPack device " + std::to_string(type));
  }
}

void read_dltensor(Array& a, const nb::dlpack::dltensor& t, const std::string& what) {
  set_rank(a, t.ndim, what);
  set_dtype(a, t.dtype);
  set_device(a, t.device.device_type, t.device.device_id, what);
  a.tensor.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  int64_t dense = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    a.tensor.shape[i] = t.shape[i];
    a.tensor.stride[i] = t.strides ? t.strides[i] : dense;
    dense *= t.shape[i];
  }
}

[[noreturn]] void fail_with_python_error() { throw nb::python_error(); }

nb::object new_reference(PyObject* result) {
  if (!result) fail_with_python_error();
  return nb::steal<nb::object>(result);
}

nb::object keyword_call(nb::handle function, nb::handle args, nb::handle kwargs) {
  return new_reference(
      asking_for_gil([&] { return PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()); }));
}

nb::object plain_call(nb::handle function) {
  return new_reference(asking_for_gil([&] { return PyObject_CallNoArgs(function.ptr()); }));
}

nb::object imported(const char* module) {
  return new_reference(asking_for_gil([&] { return PyImport_ImportModule(module); }));
}

// What an array's attribute gives, of `size` elements at least: nanobind takes it for a tuple as it
// is, and reads past the end of a shorter one.
nb::tuple tuple_of(nb::handle object, size_t size = 0) {
  if (!PyTuple_Check(object.ptr()) || nb::len(object) < size) throw std::bad_cast();
  return nb::borrow<nb::tuple>(object);
}

// A torch without the exchange table, or a tensor that it cannot carry: by attributes.
void read_torch(Array& a, nb::handle t, const std::string& what) {
  const nb::object layout = t.attr("layout");
  if (const auto name = nb::cast<std::string>(nb::str(layout)); name != "torch.strided")
    throw Error(ErrorCode::kInvalidArgument,
                what + ": expected a dense tensor, found one of layout " + name);
  const nb::tuple shape = tuple_of(t.attr("shape"));
  const nb::tuple stride = tuple_of(t.attr("stride")(), nb::len(shape));
  set_rank(a, static_cast<int64_t>(nb::len(shape)), what);
  for (int i = 0; i < a.tensor.rank; ++i) {
    a.tensor.shape[i] = nb::cast<int64_t>(shape[i]);
    a.tensor.stride[i] = nb::cast<int64_t>(stride[i]);
  }
  const nb::object dtype = t.attr("dtype"), device = t.attr("device"), index = device.attr("index");
  set_dtype(a, nb::cast<std::string>(nb::str(dtype)).substr(sizeof("torch.") - 1));
  const std::string type = nb::cast<std::string>(device.attr("type"));
  if (type != "cpu" && type != "cuda")
    throw Error(ErrorCode::kInvalidArgument,
                what + ": expected a CPU or CUDA tensor, found one on " + type);
  set_device(a, type == "cpu" ? kDlCpu : kDlCuda, index.is_none() ? 0 : nb::cast<int32_t>(index),
             what);
  a.tensor.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(t.attr("data_ptr")()));
}

// torch may leave the imaginary part of a conjugate to be negated when it is read. Those are floats
// two apart, so that others are not asked.
void refuse_pending_negation(const Array& a, nb::handle t, const std::string& what) {
  if (a.tensor.dtype != DType::kF32 || a.other_dtype) return;
  for (int i = 0; i < a.tensor.rank; ++i)
    if (a.tensor.shape[i] > 1 && a.tensor.stride[i] % 2 != 0) return;
  if (nb::hasattr(t, "is_neg") && nb::cast<bool>(t.attr("is_neg")()))
    throw Error(ErrorCode::kInvalidArgument,
                what +
                    ": expected values as they lie in memory, found a tensor that is yet to be "
                    "negated (resolve_neg())");
}

// NumPy and CuPy: their interface dictionary. Unlike DLPack it carries read-only arrays and
// ml_dtypes.
void read_interface(Array& a, nb::handle t, const char* attribute, const std::string& what) {
  const nb::dict d = nb::cast<nb::dict>(t.attr(attribute));
  const nb::tuple shape = tuple_of(d["shape"]), data = tuple_of(d["data"], 2);
  set_rank(a, static_cast<int64_t>(nb::len(shape)), what);
  set_dtype(a, nb::cast<std::string>(nb::str(t.attr("dtype").attr("name"))));
  if (nb::cast<std::string>(nb::str(d["typestr"])).starts_with('>')) a.other_dtype = "big-endian";
  a.tensor.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(data[0]));
  a.read_only = nb::cast<bool>(data[1]);
  const nb::object strides = d.contains("strides") ? nb::object(d["strides"]) : nb::none();
  // A dtype of no bytes ("V0") is refused with the others that winnow does not know.
  const int64_t item = std::max<int64_t>(nb::cast<int64_t>(t.attr("dtype").attr("itemsize")), 1);
  int64_t dense = 1;
  for (int i = a.tensor.rank - 1; i >= 0; --i) {
    a.tensor.shape[i] = nb::cast<int64_t>(shape[i]);
    const int64_t bytes = strides.is_none() ? dense * item : nb::cast<int64_t>(strides[i]);
    if (bytes % item != 0)
      throw Error(
          ErrorCode::kInvalidArgument,
          what + ": expected strides of whole elements, found " + std::to_string(bytes) + " bytes");
    a.tensor.stride[i] = bytes / item;
    dense *= a.tensor.shape[i];
  }
}

// What __dlpack__ gives. A producer of DLPack before 1.0 knows no max_version; one with a read-only
// array gives nothing without it.
nb::object dlpack_capsule(nb::handle object) {
  const nb::object method = object.attr("__dlpack__");
  try {
    return plain_call(method);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_BufferError) && !e.matches(PyExc_TypeError)) throw;
    nb::dict version;
    version["max_version"] = nb::make_tuple(1, 1);
    try {
      return keyword_call(method, nb::tuple(), version);
    } catch (const nb::python_error&) {
      // The first error says more than one about an unknown keyword.
    }
    throw;
  }
}

// Anything else with __dlpack__ (JAX): immutable as far as winnow is concerned.
void read_capsule(Array& a, nb::handle object, const std::string& what) {
  // Asked first: an array on a device that cannot be used need not be exported.
  if (nb::hasattr(object, "__dlpack_device__")) {
    const nb::tuple device = tuple_of(plain_call(object.attr("__dlpack_device__")), 2);
    set_device(a, nb::cast<int32_t>(device[0]), nb::cast<int32_t>(device[1]), what);
  }
  using Owned = nb::ndarray<nb::ro>;
  const nb::object capsule = dlpack_capsule(object);
  if (!PyCapsule_CheckExact(capsule.ptr()))
    throw nb::type_error((what + ": expected an array, found one whose __dlpack__ gives " +
                          Py_TYPE(capsule.ptr())->tp_name)
                             .c_str());
  const auto t = std::make_shared<Owned>(nb::cast<Owned>(capsule));
  set_rank(a, static_cast<int64_t>(t->ndim()), what);
  set_dtype(a, t->dtype());
  set_device(a, t->device_type(), t->device_id(), what);
  a.tensor.data = const_cast<void*>(static_cast<const void*>(t->data()));
  for (int i = 0; i < a.tensor.rank; ++i) {
    a.tensor.shape[i] = static_cast<int64_t>(t->shape(i));
    a.tensor.stride[i] = t->stride(i);
  }
  a.read_only = true;
  a.keep = t;
}

// torch's message goes on with the stack's frames, line by line.
void allocation_failed(void* context, const char*, const char* message) {
  const std::string_view text = message ? message : "no message";
  *static_cast<std::string*>(context) = text.substr(0, text.find('\n'));
}

nb::object exchange_empty(const Origin& o, const NamedDtype& dtype,
                          std::span<const int64_t> shape) {
  int64_t sizes[4];
  std::copy(shape.begin(), shape.end(), sizes);
  nb::dlpack::dltensor prototype;
  prototype.device = {o.device == DeviceKind::kCuda ? kDlCuda : kDlCpu, o.index};
  prototype.ndim = static_cast<int32_t>(shape.size());
  prototype.dtype = dtype.code;
  prototype.shape = sizes;
  std::string message;
  DlpackManaged* managed = nullptr;
  if (o.exchange->allocate(&prototype, &managed, &message, allocation_failed) != 0) {
    PyErr_Format(PyExc_MemoryError, "no memory for an output: %s", message.c_str());
    fail_with_python_error();
  }
  void* object = nullptr;
  if (o.exchange->object_from_managed(managed, &object) != 0) fail_with_python_error();
  return nb::steal(nb::handle(static_cast<PyObject*>(object)));
}

const NamedDtype& named(DType dtype) {
  for (const NamedDtype& d : kDtypes)
    if (d.dtype == dtype) return d;
  return kDtypes[0];
}

// The dtype object of NumPy or CuPy.
nb::object array_dtype(DType dtype) {
  const char* name = dtype_name(dtype);
  if (dtype != DType::kBf16 && dtype != DType::kE4m3) return nb::str(name);
  static nb::object* types = new nb::object();  // ml_dtypes, or None; never destroyed
  if (!types->is_valid()) {
    PyObject* module = PyImport_ImportModule("ml_dtypes");
    if (!module) PyErr_Clear();
    *types = module ? nb::steal(nb::handle(module)) : nb::none();
  }
  if (types->is_none()) return nb::str(dtype == DType::kBf16 ? "uint16" : "uint8");
  return types->attr(name);
}

}  // namespace

const char* dtype_name(DType dtype) { return named(dtype).name; }

std::string device_name(DeviceKind kind, int index) {
  return kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(index);
}

bool is_array(nb::handle object) {
  return object.is_valid() && !object.is_none() && info_of(object).library != Library::kNone;
}

namespace {

Array read_array(nb::handle object, const std::string& what) {
  const TypeInfo& info = info_of(object);
  Array a;
  a.origin.library = info.library;
  a.origin.exchange = info.exchange;
  switch (info.library) {
    case Library::kExchange: {
      nb::dlpack::dltensor t;
      if (info.exchange->view_of_object(object.ptr(), &t) == 0) {
        read_dltensor(a, t, what);
      } else {
        PyErr_Clear();
        read_torch(a, object, what);
      }
      refuse_pending_negation(a, object, what);
      break;
    }
    case Library::kTorch:
      read_torch(a, object, what);
      refuse_pending_negation(a, object, what);
      break;
    case Library::kNumpy: read_interface(a, object, "__array_interface__", what); break;
    case Library::kCuda:
      read_interface(a, object, "__cuda_array_interface__", what);
      set_device(a, kDlCuda, nb::cast<int32_t>(tuple_of(object.attr("__dlpack_device__")(), 2)[1]),
                 what);
      break;
    case Library::kDlpack: read_capsule(a, object, what); break;
    case Library::kNone:
      throw nb::type_error(
          (what + ": expected an array (PyTorch, NumPy, or anything with DLPack), found " +
           Py_TYPE(object.ptr())->tp_name)
              .c_str());
  }
  return a;
}

// A fake tensor, one that wraps others (DTensor) and one whose storage was given back have a shape
// and no memory; their data pointer is null, or where torch adds the tensor's offset to that.
void refuse_without_memory(const Array& a, nb::handle object, const std::string& what) {
  constexpr uintptr_t kLow = uintptr_t{1} << 40;  // heaps of processes lie above it, as a rule
  const auto sizes = std::span(a.tensor.shape).first(static_cast<size_t>(a.tensor.rank));
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  const bool low = reinterpret_cast<uintptr_t>(a.tensor.data) < kLow;
  if (a.tensor.data) {
    if (!info_of(object).dispatches && (!low || a.origin.device != DeviceKind::kCpu)) return;
    if (!nb::hasattr(object, "untyped_storage")) return;
    const nb::object address = object.attr("untyped_storage")().attr("data_ptr")();
    if (nb::cast<uintptr_t>(address) != 0) return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              what + ": expected an array with memory of its own, found a " +
                  Py_TYPE(object.ptr())->tp_name + " without");
}

// "KeyError: 'shape'", a message's first line.
std::string text_of(const nb::python_error& e) {
  std::string text = nb::cast<std::string>(e.type().attr("__name__"));
  const nb::object said = nb::steal<nb::object>(PyObject_Str(e.value().ptr()));
  PyObject* encoded = said.is_valid()
                          ? PyUnicode_AsEncodedString(said.ptr(), "utf-8", "backslashreplace")
                          : nullptr;
  if (!encoded) {
    PyErr_Clear();
    return text;
  }
  const nb::object bytes = nb::steal<nb::object>(encoded);
  const std::string_view message = PyBytes_AS_STRING(bytes.ptr());
  return text + ": " + std::string(message.substr(0, message.find('\n')));
}

}  // namespace

// An array's attributes and methods may be anyone's code: what it raises stays as the cause.
Array view_of(nb::handle object, const std::string& what) {
  const auto message = [&](const std::string& found) {
    return what + ": expected an array, found " + Py_TYPE(object.ptr())->tp_name + ", " + found;
  };
  try {
    Array a = read_array(object, what);
    refuse_without_memory(a, object, what);
    return a;
  } catch (nb::python_error& e) {
    if (e.matches(PyExc_MemoryError) || !e.matches(PyExc_Exception)) throw;
    const std::string text = message("which raised " + text_of(e));
    nb::raise_from(e, PyExc_TypeError, "%s", text.c_str());
  } catch (const std::bad_cast&) {
    throw nb::type_error(message("whose description cannot be read").c_str());
  }
}

bool may_require_gradient(const Origin& origin, DType dtype) {
  const bool is_torch = origin.library == Library::kExchange || origin.library == Library::kTorch;
  return is_torch && (dtype == DType::kBf16 || dtype == DType::kF32 || dtype == DType::kE4m3);
}

void refuse_gradient(nb::handle object, const std::string& what) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* required = PyObject_GetAttr(object.ptr(), name);
  if (!required) PyErr_Clear();  // another library with DLPack's table
  Py_XDECREF(required);
  if (required != Py_True) return;
  if (!nb::cast<bool>(plain_call(imported("torch").attr("is_grad_enabled")))) return;
  throw Error(ErrorCode::kUnsupported,
              what +
                  ": expected a tensor without requires_grad, or a call under torch.no_grad(), as "
                  "winnow computes no gradients; found one that requires them");
}

void require_cuda_build(int index, const std::string& what) {
  static const bool there = [] {
    const auto kernels = support();
    return std::any_of(kernels.begin(), kernels.end(), [](const KernelInfo& k) {
      return k.device == "cuda" && k.stage != kEveryStage;  // which is a row of what is missing
    });
  }();
  if (there) return;
  throw Error(ErrorCode::kUnsupported,
              what + ": expected the CPU, found " + device_name(DeviceKind::kCuda, index) +
                  ": this winnow was built without CUDA; install it with `pip install . "
                  "-C cmake.define.WINNOW_CUDA=ON`");
}

Device Origin::current_device() const {
  if (device == DeviceKind::kCpu) return cpu();
  void* stream = nullptr;
  if (exchange) {
    if (exchange->current_stream(kDlCuda, index, &stream) != 0) fail_with_python_error();
  } else if (library == Library::kTorch) {
    const nb::object now = nb::module_::import_("torch").attr("cuda").attr("current_stream")(index);
    stream = reinterpret_cast<void*>(nb::cast<uintptr_t>(now.attr("cuda_stream")));
  } else if (library == Library::kCuda) {
    const nb::object now = nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")();
    stream = reinterpret_cast<void*>(nb::cast<uintptr_t>(now.attr("ptr")));
  }
  return cuda(stream, index);
}

nb::object empty_like(const Origin& o, DType dtype, std::span<const int64_t> shape) {
  if (o.exchange) return exchange_empty(o, named(dtype), shape);
  nb::list sizes;
  for (int64_t n : shape) sizes.append(n);
  nb::dict kwargs;
  const bool on_gpu = o.device == DeviceKind::kCuda;
  if (o.library == Library::kTorch) {
    const nb::object torch = imported("torch");
    kwargs["dtype"] = torch.attr(dtype_name(dtype));
    kwargs["device"] = nb::str(device_name(o.device, o.index).c_str());
    return keyword_call(torch.attr("empty"), nb::make_tuple(sizes), kwargs);
  }
  kwargs["dtype"] = array_dtype(dtype);
  return keyword_call(imported(on_gpu ? "cupy" : "numpy").attr("empty"),
                      nb::make_tuple(nb::tuple(sizes)), kwargs);
}

}  // namespace winnow::python
