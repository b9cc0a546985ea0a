#include "core/check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/overlap.h"
#include "winnow/model.h"

namespace winnow::internal::core {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kBf16: return "bf16";
    case DType::kE4m3: return "e4m3";
    case DType::kF32: return "f32";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kU8: return "uint8";
  }
  return "unknown dtype";
}

namespace {

std::string list_of(const int64_t* values, int count, const char* any) {
  std::string s = "[";
  for (int i = 0; i < count; ++i)
    s += (i ? ", " : "") + (values[i] < 0 && any ? std::string(any) : std::to_string(values[i]));
  return s + "]";
}

}  // namespace

std::string shape_of(const Tensor& t) {
  if (!t) return "nothing";
  return list_of(t.shape.data(), std::clamp(t.rank, 0, 4), nullptr) + " " + name_of(t.dtype);
}

Tensor pages_view(const Cache& cache) {
  if (!cache) return {};
  const int64_t used = page_bytes_used(cache.format, cache.page);
  const int64_t stride =
      cache.page_stride ? cache.page_stride : page_bytes(cache.format, cache.page);
  return {cache.data, DType::kU8, 2, {cache.pages, used}, {stride, 1}};
}

namespace {
// Made while there is memory: copying it takes none. Never destroyed, as static destructors may
// make calls.
const Error& no_memory_for_words = *new const Error(ErrorCode::kRuntime, "winnow: out of memory");
}  // namespace

void out_of_memory(const char* stage) {
  try {
    throw Error(ErrorCode::kRuntime, std::string(stage) + ": out of memory");
  } catch (const std::bad_alloc&) {
    throw no_memory_for_words;
  }
}

void Check::fail(const char* argument, const std::string& expected,
                 const std::string& found) const {
  throw Error(ErrorCode::kInvalidArgument,
              cat(stage_, ": ", part_, argument, ": expected ", expected, ", found ", found));
}

int64_t Check::range(int64_t value, const char* argument, int64_t lo, int64_t hi) const {
  that(lo <= value && value <= hi, argument, cat(lo, " to ", hi), cat(value));
  return value;
}

void Check::layout(const Tensor& t, const char* argument, DType dtype,
                   std::initializer_list<int64_t> shape, bool contiguous) const {
  const auto mismatch = [&] {
    fail(argument,
         list_of(shape.begin(), static_cast<int>(shape.size()), "any") + " " + name_of(dtype),
         shape_of(t));
  };
  if (t.rank != static_cast<int>(shape.size()) || t.dtype != dtype) mismatch();
  int64_t extent = 1;  // elements from the first to one past the last
  int64_t count = 1;   // of elements: more than the extent when a stride is 0
  for (int i = 0; i < t.rank; ++i) {
    const int64_t want = shape.begin()[i];
    if (t.shape[i] < 0 || (want >= 0 && t.shape[i] != want)) mismatch();
    that(t.stride[i] >= 0, argument, "strides >= 0",
         cat("stride ", t.stride[i], " in dimension ", i));
    int64_t step = 0;
    const bool overflow =
        t.shape[i] > 0 &&
        (__builtin_mul_overflow(count, t.shape[i], &count) ||
         __builtin_mul_overflow(t.shape[i] - 1, t.stride[i], &step) ||
         __builtin_add_overflow(extent, step, &extent) || extent > INT64_MAX / 16);
    if (overflow) fail(argument, "an extent within 64 bits", shape_of(t));
  }
  if (t.size() == 0) return;
  that(t.data != nullptr, argument, "data", "a null pointer");
  that(reinterpret_cast<uintptr_t>(t.data) % size_of(dtype) == 0, argument,
       cat("data aligned to ", size_of(dtype), " bytes"), "a misaligned pointer");
  const int last = t.rank - 1;
  that(!contiguous || t.stride[last] == 1 || t.shape[last] == 1, argument,
       "a contiguous innermost dimension", cat("stride ", t.stride[last]));
}

void Check::tensor(const Tensor& t, const char* argument, DType dtype,
                   std::initializer_list<int64_t> shape) const {
  layout(t, argument, dtype, shape, true);
}

void Check::strided(const Tensor& t, const char* argument, DType dtype,
                    std::initializer_list<int64_t> shape) const {
  layout(t, argument, dtype, shape, false);
}

bool Check::optional(const Tensor& t, const char* argument, DType dtype,
                     std::initializer_list<int64_t> shape) const {
  if (!t) return false;
  layout(t, argument, dtype, shape, true);
  return true;
}

void Check::output(const Tensor& t, const char* argument, DType dtype,
                   std::initializer_list<int64_t> shape) const {
  layout(t, argument, dtype, shape, false);
  if (t.size() == 0) return;
  // Each stride must clear the extent of those below it.
  int64_t extent = 1;
  for (const auto& [stride, count] : dimensions_of(t)) {
    that(stride >= extent || count == 1, argument, "elements that do not overlap",
         cat("stride ", stride));
    extent += (count - 1) * stride;
  }
}

void Check::output_rows(const Tensor& t, const char* argument, DType dtype,
                        std::initializer_list<int64_t> shape) const {
  output(t, argument, dtype, shape);
  tensor(t, argument, dtype, shape);
}

void Check::apart(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
  Addresses written[kMostOutputs];
  int count = 0;
  const auto refuse = [this](const Named& output, const Named& other) {
    const char* found = "memory that overlaps it";
    that(other.may_be != &output.view, output.name,
         cat(other.name, " itself, or memory apart from it"), found);
    fail(output.name, cat("memory apart from ", other.name), found);
  };
  for (const Named& output : outputs) {
    const Addresses own = addresses_of(output.view);
    for (int i = 0; i < count; ++i) {
      const Named& before = outputs.begin()[i];
      if (own.meet(written[i]) && share_bytes(output.view, before.view)) refuse(before, output);
    }
    written[count++] = own;
  }
  for (const Named& input : inputs) {
    const Addresses read = addresses_of(input.view);
    for (int i = 0; i < count; ++i) {
      const Named& output = outputs.begin()[i];
      if (!read.meet(written[i])) continue;
      if (input.may_be == &output.view && same_view(output.view, input.view)) continue;
      if (share_bytes(output.view, input.view)) refuse(output, input);
    }
  }
}

void Check::rows_of_16(const Tensor& t, const char* argument) const {
  const bool ok =
      reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0;
  that(ok || t.size() == 0, argument, "rows aligned to 16 bytes on CUDA",
       cat("strides ", t.stride[0], ", ", t.stride[1]));
}

void Check::scale(float value) const {
  that(!std::isnan(value), "scale", "a number (V3.2: 192^-1/2 * m^2, V4: 512^-1/2)", "none (NaN)");
}

void Check::workspace(std::span<const std::byte> given, size_t bytes) const {
  that(given.size() >= bytes, "workspace", cat("at least ", bytes, " bytes"), cat(given.size()));
  that(given.data() != nullptr || given.empty(), "workspace", "data", "a null pointer");
}

void Check::pages(int64_t pages, const Tensor& block_table, int64_t most) const {
  range(pages, "pages", block_table.size() > 0 ? 1 : 0, most);
}

namespace {

int64_t page_alignment(CacheFormat format, DeviceKind device) {
  if (format == CacheFormat::kIndexKeys) return 4;
  if (device != DeviceKind::kCpu) return 16;
  return format == CacheFormat::kV32Fp8 ? 4 : 2;  // fp32 scales, or bf16 at most
}

}  // namespace

Cache Check::cache(const Cache& c, const char* argument, CacheUse use) const {
  that(c.data != nullptr || c.pages != 0, argument, "a cache", "none");
  Cache r = c;
  that(name_of(c.format) != "unknown", argument, "a format of CacheFormat",
       cat("number ", static_cast<int>(c.format)));
  if (c.page < 1) range(c.page, std::string(cat(argument, ".page")).c_str(), 1, INT32_MAX);
  if (c.pages < 0 || c.pages > INT64_MAX / c.page)
    range(c.pages, std::string(cat(argument, ".pages")).c_str(), 0, INT64_MAX / c.page);
  const int64_t used = page_bytes_used(c.format, c.page);
  if (r.page_stride == 0) r.page_stride = page_bytes(c.format, c.page);
  that(r.page_stride >= used, argument, cat("page_stride of at least ", used, " bytes"),
       cat(r.page_stride));
  const int64_t align = page_alignment(c.format, use.device);
  that(reinterpret_cast<uintptr_t>(c.data) % align == 0 && r.page_stride % align == 0, argument,
       cat("data and page_stride aligned to ", align, " bytes"),
       cat("address ", reinterpret_cast<uintptr_t>(c.data) % align, " past, stride ",
           r.page_stride));
  int64_t bytes = 0;
  that(!__builtin_mul_overflow(c.pages, r.page_stride, &bytes), argument, "a size within 64 bits",
       cat(c.pages, " pages"));
  that(c.pages == 0 || c.data != nullptr, argument, "data", "a null pointer");
  that(!use.slots32 || c.pages * c.page <= INT32_MAX, argument,
       "at most 2147483647 slots (indices are int32)", cat(c.pages * c.page));
  return r;
}

}  // namespace winnow::internal::core
