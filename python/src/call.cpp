#include "call.h"

#include <nanobind/stl/string.h>

#include <map>
#include <optional>

#include "winnow/error.h"

namespace winnow::python {

namespace {

std::string_view trimmed(std::string_view s) {
  while (!s.empty() && s.front() == ' ') s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ') s.remove_suffix(1);
  return s;
}

// "a: int, b: tuple[int, int] = (0, 1)" at its outer commas.
std::vector<std::string_view> parts(std::string_view s) {
  std::vector<std::string_view> out;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    const char c = i < s.size() ? s[i] : ',';
    depth += (c == '[' || c == '(') - (c == ']' || c == ')');
    if (c != ',' || (depth > 0 && i < s.size())) continue;
    if (const auto part = trimmed(s.substr(begin, i - begin)); !part.empty()) out.push_back(part);
    begin = i + 1;
  }
  return out;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string s;
  for (const std::string& n : names) s += (s.empty() ? "" : ", ") + n;
  return s;
}

// "[2, 3] int64 on cpu"
std::string description(const Tensor& t, const Origin& origin) {
  std::string s;
  for (int i = 0; i < t.rank; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return "[" + s + "] on " + device_name(origin.device, origin.index) + " of " +
         dtype_name(t.dtype);
}

[[noreturn]] void type_error(const std::string& message) { throw nb::type_error(message.c_str()); }

// A bool of Python or of NumPy, and nothing else that has a truth: "no" is true, too.
std::optional<bool> truth_of(nb::handle h) {
  if (h.ptr() == Py_True) return true;
  if (h.ptr() == Py_False) return false;
  const std::string_view type = Py_TYPE(h.ptr())->tp_name;  // NumPy 2's and NumPy 1's
  if (type != "numpy.bool" && type != "numpy.bool_") return {};
  return PyObject_IsTrue(h.ptr()) == 1;
}

// The memory of the calls on a device's default stream, which follow each other: a new array for
// each of them would cost the host half as much as the call. Null where another thread is about to
// use it, and on other streams, where a graph may be captured or memory come from a graph's pool.
Scratch* kept_scratch(const Device& device, size_t bytes) {
  constexpr size_t kMostKept = 257 << 20;  // score_select takes up to 256 MB and its alignment
  if (device.kind != DeviceKind::kCuda || device.stream || bytes > kMostKept) return nullptr;
  // never destroyed, as Python is gone by then; the GIL is held
  static auto* kept = new std::map<int, Scratch>();
  Scratch& s = (*kept)[device.index];
  return s.taken ? nullptr : &s;
}

// The signatures of all functions, by name. They live as long as the process.
std::map<std::string_view, const Signature*>& signatures() {
  static auto* all = new std::map<std::string_view, const Signature*>();
  return *all;
}

}  // namespace

std::string utf8(nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) throw nb::python_error();
  return {bytes, static_cast<size_t>(size)};
}

const Plan& PyPlan::at_rest(const std::string& stage) const {
  if (refilling)
    throw Error(ErrorCode::kRuntime,
                stage + ": plan: expected one at rest, found one that another thread refills");
  return plan;
}

Signature::Signature(const char* text) {
  std::string_view s(text);
  s.remove_prefix(sizeof("def ") - 1);
  const size_t open = s.find('('), close = s.rfind(") ->");
  name = s.substr(0, open);
  bool only_keywords = false;
  for (std::string_view part : parts(s.substr(open + 1, close - open - 1))) {
    if (part == "self") continue;
    if (part == "*") {
      only_keywords = true;
      continue;
    }
    parameters.emplace_back(trimmed(part.substr(0, part.find_first_of(":="))));
    required.push_back(part.find('=') == part.npos);
    keys.push_back(nb::steal(nb::handle(PyUnicode_InternFromString(parameters.back().c_str()))));
    positional += !only_keywords;
  }
}

Call::Call(const Signature& signature, nb::handle args, nb::handle kwargs)
    : signature_(signature), prefix_(signature.name + ": ") {
  const auto& s = signature_;
  const size_t given = static_cast<size_t>(PyTuple_GET_SIZE(args.ptr()));
  if (given > s.positional)
    type_error(s.name + "() takes " + std::to_string(s.positional) + " positional arguments but " +
               std::to_string(given) + " were given");
  for (size_t i = 0; i < given; ++i) values_[i] = PyTuple_GET_ITEM(args.ptr(), i);
  take(kwargs);
  check_required();
}

Call::Call(const Signature& signature, nb::object keywords, const Call& whole, std::string prefix)
    : signature_(signature),
      prefix_(std::move(prefix)),
      keywords_(std::move(keywords)),
      origin_(whole.origin_),
      has_origin_(whole.has_origin_) {
  take(keywords_);
  // What the whole call has, or does without.
  for (const std::string& name : signature_.parameters)
    if ((name == "plan" || name == "kernel") && given(name))
      fail(name, "none in a part of " + whole.signature_.name + "()", "one");
  check_required();
}

void Call::take(nb::handle keywords) {
  const auto& s = signature_;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(keywords.ptr(), &at, &key, &value);) {
    if (!PyUnicode_Check(key)) type_error(s.name + "() takes names of arguments that are str");
    size_t i = 0;
    while (i < s.keys.size() && s.keys[i].ptr() != key) ++i;
    if (i == s.keys.size())  // a keyword built at run time is not interned
      for (i = 0; i < s.keys.size() && PyUnicode_Compare(key, s.keys[i].ptr()) != 0;) ++i;
    if (i == s.keys.size())
      type_error(s.name + "() got an unexpected keyword argument '" + utf8(key) + "'; it has " +
                 list_of(s.parameters));
    if (values_[i])
      type_error(s.name + "() got multiple values for argument '" + s.parameters[i] + "'");
    values_[i] = value;
  }
}

void Call::check_required() const {
  const auto& s = signature_;
  for (size_t i = 0; i < s.required.size(); ++i)
    if (s.required[i] && !values_[i])
      type_error(s.name + "() misses the argument '" + s.parameters[i] + "'");
}

size_t Call::open_parts(std::string_view name, std::string_view of, size_t most) {
  dicts_.clear();
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) return 0;
  const std::string of_it = "a dict of arguments of " + std::string(of) + "()";
  const std::string expected =
      most == 1 ? of_it : of_it + ", or a list of at most " + std::to_string(most);
  const auto copy = [&](PyObject* item) {
    if (!PyDict_Check(item)) wrong_type(name, expected.c_str());
    dicts_.push_back(nb::steal(PyDict_Copy(item)));
  };
  const bool several = most > 1 && (PyList_Check(h.ptr()) || PyTuple_Check(h.ptr()));
  if (!several) {
    copy(h.ptr());
    return 1;
  }
  const nb::object items = nb::steal(PySequence_Tuple(h.ptr()));
  const size_t count = nb::len(items);
  if (count > most) fail(name, expected, std::to_string(count));
  for (size_t i = 0; i < count; ++i)
    copy(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)));
  return count;
}

Call& Call::open_part(std::string_view name, std::string_view of, size_t i) {
  std::string prefix = what(name);
  if (dicts_.size() > 1) prefix.append("[").append(std::to_string(i)).append("]");
  prefix += '.';
  parts_.push_back(
      std::make_unique<Call>(*signatures().at(of), std::move(dicts_[i]), *this, std::move(prefix)));
  return *parts_.back();
}

void Call::close_part(Call& part) {
  origin_ = part.origin_;
  has_origin_ = part.has_origin_;
  for (Output& output : part.outputs_) outputs_.push_back(std::move(output));
  part.outputs_.clear();
}

nb::handle Call::operator[](std::string_view name) const {
  const auto& names = signature_.parameters;
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return values_[i] == Py_None ? nb::handle() : nb::handle(values_[i]);
  throw std::logic_error(signature_.name + " has no argument " + std::string(name));
}

std::string Call::what(std::string_view name) const { return prefix_ + std::string(name); }

void Call::fail(std::string_view name, const std::string& expected,
                const std::string& found) const {
  throw Error(ErrorCode::kInvalidArgument,
              what(name) + ": expected " + expected + ", found " + found);
}

Precision precision_of(const Call& c) {
  const std::string precision = c.text("precision", "full");
  if (precision != "full" && precision != "fp8") c.fail("precision", "full or fp8", precision);
  return precision == "fp8" ? Precision::kFp8 : Precision::kFull;
}

// In place of what Python says, which does not name the argument.
void Call::wrong_type(std::string_view name, const char* expected) const {
  PyErr_Clear();
  type_error(what(name) + ": expected " + expected + ", found " +
             Py_TYPE((*this)[name].ptr())->tp_name);
}

int64_t Call::integer(std::string_view name, int64_t otherwise) const {
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) return otherwise;
  const nb::object index = nb::steal(nb::handle(PyNumber_Index(h.ptr())));
  if (!index.is_valid()) wrong_type(name, "an int");
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) fail(name, "an int64", nb::cast<std::string>(nb::repr(index)));
  return value;
}

int32_t Call::int32(std::string_view name, int32_t otherwise) const {
  const int64_t value = integer(name, otherwise);
  if (value != static_cast<int32_t>(value)) fail(name, "an int32", std::to_string(value));
  return static_cast<int32_t>(value);
}

int64_t Call::size(std::string_view name, int64_t otherwise) const {
  const int64_t value = integer(name, otherwise);
  if (value < 0 && given(name)) fail(name, "0 or more", std::to_string(value));
  return value;
}

int64_t Call::pages_of_table() const {
  const int64_t pages = integer("pages");
  if (given("block_table") && pages < 1)
    fail("pages", "the number of pages in the cache of block_table", std::to_string(pages));
  return pages;
}

double Call::number(std::string_view name, double otherwise) const {
  return given(name) ? number(name) : otherwise;
}

double Call::number(std::string_view name) const {
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) type_error(what(name) + ": expected a number, found None");
  const double value = PyFloat_AsDouble(h.ptr());
  if (value == -1 && PyErr_Occurred()) wrong_type(name, "a number");
  return value;
}

bool Call::flag(std::string_view name, bool otherwise) const {
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) return otherwise;
  const std::optional<bool> value = truth_of(h);
  if (!value) wrong_type(name, "a bool");
  return *value;
}

std::string Call::text(std::string_view name, const char* otherwise) const {
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) return otherwise;
  if (!PyUnicode_Check(h.ptr())) wrong_type(name, "a str");
  std::string value = utf8(h);
  // C++ would read the name in front of it.
  if (value.find('\0') != std::string::npos) fail(name, "a str without null characters", "one");
  return value;
}

void Call::same_device(std::string_view name, const Origin& origin) {
  if (!has_origin_) {
    origin_ = origin;
    has_origin_ = true;
    return;
  }
  if (origin.device != origin_.device || origin.index != origin_.index)
    fail(name,
         "an array on " + device_name(origin_.device, origin_.index) + ", as the ones before it",
         "one on " + device_name(origin.device, origin.index));
}

std::vector<int32_t> Call::integers(std::string_view name) {
  const nb::handle h = (*this)[name];
  std::vector<int32_t> values;
  if (!h.is_valid()) return values;
  if (is_array(h)) {
    const Tensor t = in(name);
    if (t.rank != 1 || t.dtype != DType::kI32 || origin_.device != DeviceKind::kCpu)
      fail(name, "one dimension in host memory of int32", description(t, origin_));
    for (int64_t i = 0; i < t.shape[0]; ++i)
      values.push_back(static_cast<const int32_t*>(t.data)[i * t.stride[0]]);
    return values;
  }
  PyObject* items = PyObject_GetIter(h.ptr());
  if (!items) wrong_type(name, "an int32 array or a sequence of ints");
  for (nb::handle item : nb::steal<nb::iterator>(items)) {
    int32_t value = 0;
    if (!nb::try_cast(item, value))
      fail(name, "int32 values", nb::cast<std::string>(nb::repr(item)));
    values.push_back(value);
  }
  return values;
}

std::span<int32_t> Call::integers_out(int64_t count) {
  const Tensor t = out("out", DType::kI32, {count});
  if (t.rank != 1 || t.dtype != DType::kI32 || (t.stride[0] != 1 && t.shape[0] > 1) ||
      origin_.device != DeviceKind::kCpu)
    fail("out", "contiguous int32 of one dimension in host memory", "another array");
  return {static_cast<int32_t*>(t.data), static_cast<size_t>(t.shape[0])};
}

Array Call::array(std::string_view name, As as) {
  const nb::handle object = (*this)[name];
  const std::string named = what(name);
  Array a = view_of(object, named);
  if (a.is_bool && as != As::kMask) a.other_dtype = "bool";
  if (a.other_dtype)
    fail(name, "bfloat16, float8_e4m3fn, float32, int32, int64 or uint8", a.other_dtype);
  if (may_require_gradient(a.origin, a.tensor.dtype)) refuse_gradient(object, named);
  same_device(name, a.origin);
  if (a.keep) kept_.push_back(a.keep);
  return a;
}

Tensor Call::in(std::string_view name, As as) {
  if (!given(name)) return {};
  Tensor t = array(name, as).tensor;
  if (as == As::kE4m3 && t.dtype == DType::kU8) t.dtype = DType::kE4m3;
  return t;
}

Cache Call::cache(std::string_view name, bool writes) {
  const nb::handle h = (*this)[name];
  if (!h.is_valid()) return {};
  const PyCache* c = nullptr;
  if (!nb::try_cast<const PyCache*>(h, c) || !c) wrong_type(name, "a winnow.Cache");
  same_device(name, c->origin);
  if (writes && c->read_only) fail(name, "a cache that can be written", "a read-only array");
  if (c->may_require_gradient) refuse_gradient(c->data, what(name));
  return c->cache;
}

const Plan* Call::plan() {
  const nb::handle h = (*this)["plan"];
  if (!h.is_valid()) return nullptr;
  PyPlan* held = nullptr;
  if (!nb::try_cast<PyPlan*>(h, held) || !held) wrong_type("plan", "a winnow.Plan");
  const Plan& plan = held->at_rest(signature_.name);
  const Device& d = plan.options().target.device;
  if (has_origin_ && (d.kind != origin_.device || d.index != origin_.index))
    fail("plan", "a plan for " + device_name(origin_.device, origin_.index),
         "one for " + device_name(d.kind, d.index));
  if (!plan_) ++held->calls;
  plan_ = held;
  return &plan;
}

Target Call::target() {
  kernel_ = text("kernel");
  return {device(), kernel_.empty() ? nullptr : kernel_.c_str()};
}

bool Call::wanted(std::string_view name) const {
  const nb::handle h = (*this)[name];
  return h.is_valid() && truth_of(h).value_or(true);
}

Tensor Call::out(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
  const nb::handle h = (*this)[name];
  if (!h.is_valid() || truth_of(h) == true) {
    for (int64_t n : shape)
      if (n < 0)
        fail(name, "an array", "none, and its shape cannot be told from the other arguments");
    outputs_.push_back({name, empty_like(origin_, dtype, {shape.begin(), shape.size()})});
    return view_of(outputs_.back().object, what(name)).tensor;
  }
  const std::string named = what(name);
  Array a = view_of(h, named);
  if (a.is_bool) a.other_dtype = "bool";
  if (a.other_dtype) fail(name, dtype_name(dtype), a.other_dtype);
  if (a.read_only) fail(name, "an array that can be written", "a read-only one");
  if (may_require_gradient(a.origin, a.tensor.dtype)) refuse_gradient(h, named);
  same_device(name, a.origin);
  if (dtype == DType::kE4m3 && a.tensor.dtype == DType::kU8) a.tensor.dtype = dtype;
  outputs_.push_back({name, nb::borrow(h)});
  return a.tensor;
}

void Call::agree(std::string_view name, int64_t size, const Tensor& out, int dimension) const {
  const int64_t there = out.shape[dimension];
  if (!given(name) || out.rank <= dimension || size == there) return;
  fail(name, std::to_string(there) + ", as the array to write to has", std::to_string(size));
}

std::span<std::byte> Call::scratch(size_t bytes) {
  if (bytes == 0) return {};
  taken_ = kept_scratch(device(), bytes);
  if (taken_) taken_->taken = true;
  Scratch& s = taken_ ? *taken_ : scratch_;
  if (s.memory.size() < bytes) {
    const int64_t n = static_cast<int64_t>(bytes);
    s.array = empty_like(origin_, DType::kU8, {&n, 1});
    s.memory = {static_cast<std::byte*>(view_of(s.array, {}).tensor.data), bytes};
  }
  return s.memory.first(bytes);
}

std::span<std::byte> Call::workspace(size_t bytes) {
  return given("workspace") ? this->bytes("workspace") : scratch(bytes);
}

std::span<std::byte> Call::bytes(std::string_view name) {
  const Array a = array(name);
  const Tensor& t = a.tensor;
  if (a.read_only) fail(name, "an array that can be written", "a read-only one");
  if (t.rank != 1 || t.dtype != DType::kU8 || t.stride[0] != 1)
    fail(name, "contiguous uint8 of one dimension", "another array");
  return {static_cast<std::byte*>(t.data), static_cast<size_t>(t.shape[0])};
}

Call::~Call() {
  if (taken_) taken_->taken = false;  // all of the call is queued
  if (plan_) --plan_->calls;
}

nb::object Call::result(std::initializer_list<std::string_view> names) const {
  nb::list found;
  for (std::string_view name : names)
    for (const Output& o : outputs_)
      if (o.name == name) found.append(o.object);
  if (nb::len(found) == 1) return found[0];
  return nb::tuple(found);
}

void def(nb::module_& m, const char* text, Body body, const char* doc) {
  // Lives as long as the module, which is as long as the process.
  const auto* signature = new Signature(text);
  if (signature->parameters.size() > Call::kMost) throw std::logic_error(signature->name);
  signatures().emplace(signature->name, signature);
  m.def(
      signature->name.c_str(),
      [signature, body](nb::args args, nb::kwargs kwargs) {
        Call call(*signature, args, kwargs);
        return body(call);
      },
      nb::sig(text), doc);
}

}  // namespace winnow::python
