// Answers about formats, all derived from the record traits.
#include "winnow/model.h"

#include <string>

#include "core/arithmetic.h"
#include "core/check.h"
#include "model/records.h"

namespace winnow {

namespace {

constexpr CacheFormat kFormats[] = {CacheFormat::kV32Fp8,    CacheFormat::kV32Bf16,
                                    CacheFormat::kV4Fp8,     CacheFormat::kV4Bf16,
                                    CacheFormat::kIndexKeys, CacheFormat::kIndexKeysBf16};
constexpr int32_t kHeadSizes[] = {V32::kDqk, V4::kDqk};

}  // namespace

const Model& model_of(std::string_view name) try {
  if (name == kV32.name) return kV32;
  if (name == kV4.name) return kV4;
  throw Error(ErrorCode::kInvalidArgument, cat("model: expected v32 or v4, found ", name));
} catch (const std::bad_alloc&) {
  out_of_memory("model");
}

std::string_view name_of(CacheFormat format) {
  switch (format) {
    case CacheFormat::kV32Fp8: return "v32_fp8";
    case CacheFormat::kV32Bf16: return "v32_bf16";
    case CacheFormat::kV4Fp8: return "v4_fp8";
    case CacheFormat::kV4Bf16: return "v4_bf16";
    case CacheFormat::kIndexKeys: return "index_keys";
    case CacheFormat::kIndexKeysBf16: return "index_keys_bf16";
  }
  return "unknown";
}

CacheFormat format_of(std::string_view name) try {
  for (CacheFormat f : kFormats)
    if (name == name_of(f)) return f;
  throw Error(ErrorCode::kInvalidArgument,
              cat("format: expected v32_fp8, v32_bf16, v4_fp8, v4_bf16, index_keys or "
                  "index_keys_bf16, found ",
                  name));
} catch (const std::bad_alloc&) {
  out_of_memory("format");
}

std::span<const CacheFormat> cache_formats() { return kFormats; }
std::array<CacheFormat, 2> cache_formats(const Model& model) { return {model.fp8, model.bf16}; }
std::span<const int32_t> head_sizes() { return kHeadSizes; }
bool supports_heads(int64_t heads) { return kMinHeads <= heads && heads <= kMaxHeads; }

int64_t page_bytes_used(CacheFormat format, int64_t page) try {
  Check("model").range(page, "page", 1, INT32_MAX);
  return with_record(format, [&](auto r) { return decltype(r)::used(page); });
} catch (const std::bad_alloc&) {
  out_of_memory("page_bytes");
}

int64_t page_bytes(CacheFormat format, int64_t page) try {
  const int64_t used = page_bytes_used(format, page);
  const int64_t align = with_record(format, [](auto r) { return decltype(r)::kPageAlign; });
  return round_up(used, align);
} catch (const std::bad_alloc&) {
  out_of_memory("page_bytes");
}

std::array<int64_t, 2> cache_shape(CacheFormat format, int64_t pages, int64_t page) try {
  Check("model").range(pages, "pages", 0, INT64_MAX / page_bytes(format, page));
  return {pages, page_bytes(format, page)};
} catch (const std::bad_alloc&) {
  out_of_memory("cache_shape");
}

int32_t record_dim(CacheFormat format) {
  return with_record(format, [](auto r) { return decltype(r)::kDim; });
}

}  // namespace winnow
