// Cache, Model, formats and page sizes; what this build can do.
#include "winnow/model.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "call.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::python {

namespace {

[[noreturn]] void invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.rank; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + "] " + dtype_name(t.dtype);
}

// Pages as rows of bytes: [pages, >= page bytes]; or records: [pages, page, bytes of a record],
// with a dimension of 1 before the last as engines have it; or a contiguous bf16 KV, [rows, d].
struct Layout {
  const Tensor& t;
  CacheFormat format;
  std::optional<int64_t> page;

  int64_t item() const { return size_of(t.dtype); }
  int64_t record() const { return page_bytes_used(format, 1); }
  bool is_bf16() const { return record() == record_dim(format) * 2; }

  Cache cache() const {
    const bool bytes = t.dtype == DType::kU8 || t.dtype == DType::kE4m3;
    if (!bytes && !(is_bf16() && t.dtype == DType::kBf16))
      invalid("Cache: data: expected uint8" + std::string(is_bf16() ? " or bfloat16" : "") +
              ", found " + dtype_name(t.dtype));
    if (t.rank == 2 && !page && !bytes) return rows();
    if (t.rank == 2) return pages_of_bytes();
    if (t.rank == 3 || (t.rank == 4 && t.shape[2] == 1)) return pages_of_records();
    invalid(
        "Cache: data: expected [pages, bytes], [pages, page, bytes] or [pages, page, 1, bytes], "
        "found " +
        shape_text(t));
  }

  // Rows that stand apart are pages of one token each.
  Cache rows() const {
    if (t.shape[1] * item() != record() || t.stride[1] != 1)
      invalid("Cache: data: expected contiguous rows of " + std::to_string(record_dim(format)) +
              ", found " + shape_text(t));
    if (t.shape[0] > 1 && t.stride[0] != t.shape[1])
      return {t.data, format, t.shape[0], 1, stride(1)};
    return {t.data, format, t.shape[0] > 0, static_cast<int32_t>(std::max<int64_t>(t.shape[0], 1)),
            0};
  }

  Cache pages_of_bytes() const {
    const int64_t tokens = page.value_or(64), used = page_bytes_used(format, tokens);
    if (t.stride[1] != 1 || t.shape[1] * item() < used)
      invalid("Cache: data: expected contiguous pages of at least " + std::to_string(used) +
              " bytes for " + std::to_string(tokens) + " tokens, found " + shape_text(t));
    return {t.data, format, t.shape[0], static_cast<int32_t>(tokens), stride(tokens)};
  }

  Cache pages_of_records() const {
    const int64_t tokens = t.shape[1], d = t.shape[t.rank - 1];
    if (page && *page != tokens)
      invalid("Cache: page: expected " + std::to_string(tokens) + " as in data, found " +
              std::to_string(*page));
    const bool dense = t.stride[t.rank - 1] == 1 && (tokens <= 1 || t.stride[1] == d);
    if (d * item() != record() || !dense)
      invalid("Cache: data: expected contiguous records of " + std::to_string(record()) +
              " bytes, found " + shape_text(t));
    return {t.data, format, t.shape[0], static_cast<int32_t>(tokens), stride(tokens)};
  }

  // A single page may have any stride, which is not read then. Of several, a stride of 0 (an
  // expanded tensor) would be taken for one that is not given.
  int64_t stride(int64_t tokens) const {
    if (t.shape[0] <= 1) return 0;
    const int64_t used = page_bytes_used(format, tokens);
    const int64_t bytes = t.stride[0] * item();
    if (bytes < used)
      invalid("Cache: data: expected pages at least " + std::to_string(used) +
              " bytes apart, so that they do not overlap, found stride " + std::to_string(bytes));
    return bytes;
  }
};

std::optional<int64_t> page_of(nb::handle page) {
  if (page.is_none()) return std::nullopt;
  int64_t value = 0;
  if (nb::try_cast(page, value)) return value;
  throw nb::type_error(
      ("Cache: page: expected an int64, found " + nb::cast<std::string>(nb::repr(page))).c_str());
}

void make_cache(PyCache* self, nb::object data, std::string_view format, nb::object given_page) {
  const std::optional<int64_t> page = page_of(given_page);
  Array a = view_of(data, "Cache: data");
  // Bytes by another name, which FlashMLA takes as well.
  if (a.other_dtype && std::string_view(a.other_dtype) == "int8") {
    a.other_dtype = nullptr;
    a.tensor.dtype = DType::kU8;
  }
  static std::byte nothing alignas(64);  // an empty cache is a cache, though its data may be null
  if (!a.tensor.data && a.tensor.size() == 0 && a.origin.device == DeviceKind::kCpu)
    a.tensor.data = &nothing;
  if (a.is_bool) a.other_dtype = "bool";
  if (a.other_dtype) invalid(std::string("Cache: data: expected uint8, found ") + a.other_dtype);
  const Cache cache = Layout{a.tensor, format_of(format), page}.cache();
  const bool gradient = may_require_gradient(a.origin, a.tensor.dtype);
  new (self) PyCache{cache,           a.origin,          a.read_only,          gradient,
                     std::move(data), std::move(a.keep), std::move(given_page)};
}

std::string cache_text(const PyCache& c) {
  return "Cache(" + std::string(name_of(c.cache.format)) +
         ", pages=" + std::to_string(c.cache.pages) + ", page=" + std::to_string(c.cache.page) +
         ", " + device_name(c.origin.device, c.origin.index) + ")";
}

void bind_cache(nb::module_& m) {
  nb::class_<PyCache>(m, "Cache", R"(A paged cache: a view of an array that the caller keeps.

data    [pages, page bytes] uint8, rows of any stride; or [pages, page, bytes per token] or
        [pages, page, 1, bytes per token] in uint8 (fp8 formats) or bf16 (bf16 formats); or
        [rows, d] bf16: a contiguous KV
format  "v32_fp8", "v32_bf16", "v4_fp8", "v4_bf16", "index_keys" or "index_keys_bf16"
page    tokens per page, 64 where data does not say

The array's address is taken once: do not resize it behind the cache's back.)")
      .def("__init__", make_cache, nb::arg("data"), nb::arg("format"), nb::arg("page") = nb::none(),
           nb::sig("def __init__(self, data: Array, format: str, page: int | None = None) -> None"))
      .def_prop_ro("data", [](const PyCache& c) { return c.data; })
      .def_prop_ro("format", [](const PyCache& c) { return name_of(c.cache.format); })
      .def_prop_ro("pages", [](const PyCache& c) { return c.cache.pages; })
      .def_prop_ro("page", [](const PyCache& c) { return c.cache.page; })
      .def_prop_ro("slots", [](const PyCache& c) { return c.cache.pages * c.cache.page; })
      .def_prop_ro("page_stride",
                   [](const PyCache& c) {
                     return c.cache.page_stride ? c.cache.page_stride
                                                : page_bytes(c.cache.format, c.cache.page);
                   })
      .def_prop_ro("device",
                   [](const PyCache& c) { return device_name(c.origin.device, c.origin.index); })
      // A copy is a view of the same array, a deep copy and an unpickled one of an array like it.
      .def("__reduce__",
           [](nb::handle self) {
             const PyCache& c = nb::cast<const PyCache&>(self);
             return nb::make_tuple(self.type(),
                                   nb::make_tuple(c.data, name_of(c.cache.format), c.page));
           })
      .def("__repr__", cache_text);
}

void bind_models(nb::module_& m) {
  nb::class_<Model>(m, "Model", "A model family as data.")
      .def_prop_ro("name", [](const Model& x) { return x.name; })
      .def_ro("d_qk", &Model::d_qk)
      .def_ro("d_v", &Model::d_v)
      .def_ro("d_nope", &Model::d_nope)
      .def_ro("d_rope", &Model::d_rope)
      .def_prop_ro("fp8", [](const Model& x) { return name_of(x.fp8); })
      .def_prop_ro("bf16", [](const Model& x) { return name_of(x.bf16); })
      .def_ro("lists", &Model::lists)
      .def_ro("default_topk", &Model::default_topk)
      .def_ro("window", &Model::window)
      .def("__repr__", [](const Model& x) { return "Model(" + std::string(x.name) + ")"; });
  m.attr("V32") = nb::cast(kV32);
  m.attr("V4") = nb::cast(kV4);
  m.attr("INDEX_DIM") = kIndexDim;
  m.def(
      "cache_formats",
      [](std::optional<Model> model) {
        std::vector<std::string> names;
        if (model)
          for (CacheFormat f : cache_formats(*model)) names.emplace_back(name_of(f));
        else
          for (CacheFormat f : cache_formats()) names.emplace_back(name_of(f));
        return names;
      },
      nb::arg("model") = nb::none(), "Names of all cache formats, or of a model's (fp8 first).");
  m.def(
      "head_sizes", [] { return std::vector<int32_t>(head_sizes().begin(), head_sizes().end()); },
      "Sizes d_qk that attend() serves.");
  m.def("supports_heads", supports_heads, nb::arg("heads"), "1 <= heads <= 128.");
  m.def(
      "page_bytes", [](std::string_view f, int64_t page) { return page_bytes(format_of(f), page); },
      nb::arg("format"), nb::arg("page") = 64, "Bytes of a page, with the format's padding.");
  m.def(
      "page_bytes_used",
      [](std::string_view f, int64_t page) { return page_bytes_used(format_of(f), page); },
      nb::arg("format"), nb::arg("page") = 64, "Bytes that the records of a page take.");
  m.def(
      "cache_shape",
      [](std::string_view f, int64_t pages, int64_t page) {
        const auto s = cache_shape(format_of(f), pages, page);
        return nb::make_tuple(s[0], s[1]);
      },
      nb::arg("format"), nb::arg("pages"), nb::arg("page") = 64,
      nb::sig("def cache_shape(format: str, pages: int, page: int = 64) -> tuple[int, int]"),
      "[pages, page bytes]: the shape of the uint8 array to allocate for a Cache.");
  m.def(
      "record_dim", [](std::string_view f) { return record_dim(format_of(f)); }, nb::arg("format"),
      "Values per token of a format: 576, 512 or 128.");
}

void bind_support(nb::module_& m) {
  nb::class_<KernelInfo>(m, "KernelInfo",
                         "A kernel of this build, and whether this machine runs it.")
      .def_ro("stage", &KernelInfo::stage)
      .def_ro("kernel", &KernelInfo::kernel)
      .def_ro("device", &KernelInfo::device)
      .def_ro("available", &KernelInfo::available)
      .def_ro("reason", &KernelInfo::reason)
      .def("__repr__", [](const KernelInfo& k) {
        return k.stage + "/" + k.kernel + " (" + k.device +
               (k.available ? ")" : ": " + k.reason + ")");
      });
  m.def("support", support,
        "Every kernel of every stage, in the order in which they are tried. A build without CUDA "
        "ends with a row that says why it has none.");
  m.def("cpu_name", cpu_name, "The CPU's model name and instruction sets.");
  m.def("threads", threads, "CPU workers a call uses: WINNOW_THREADS, else the process's cores.");
  m.attr("__version__") = version();
}

}  // namespace

void bind_model(nb::module_& m) {
  bind_cache(m);
  bind_models(m);
  bind_support(m);
}

}  // namespace winnow::python
