// Models, formats and what this build can do, in C.
#include "winnow/model.h"

#include <atomic>
#include <string>
#include <vector>

#include "c_api/common.h"
#include "core/made_once.h"
#include "winnow/support.h"

using winnow::CacheFormat;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;

namespace {

CacheFormat checked(winnow_format format, const In& in) {
  return in.choice(format, "format", CacheFormat::kIndexKeysBf16);
}

// The table does not change while the process lives.
const std::vector<winnow::KernelInfo>& kernels() {
  static std::atomic<const std::vector<winnow::KernelInfo>*> table{nullptr};
  return winnow::made_once(table, winnow::support);
}

}  // namespace

extern "C" {

winnow_status winnow_model_of(const char* name, winnow_model* out) {
  return guarded("model", [&](const In& in) {
    const winnow::Model& m = winnow::model_of(&in.given(name, "name"));
    // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): models' names are literals
    in.given(out, "out") = {m.name.data(),
                            m.d_qk,
                            m.d_v,
                            m.d_nope,
                            m.d_rope,
                            static_cast<winnow_format>(m.fp8),
                            static_cast<winnow_format>(m.bf16),
                            m.lists,
                            m.default_topk,
                            m.window};
  });
}

const char* winnow_format_name(winnow_format format) {
  if (format < 0 || format > WINNOW_INDEX_KEYS_BF16) return nullptr;
  return winnow::name_of(static_cast<CacheFormat>(format)).data();
}

winnow_status winnow_format_of(const char* name, winnow_format* out) {
  return guarded("format", [&](const In& in) {
    in.given(out, "out") = static_cast<winnow_format>(winnow::format_of(&in.given(name, "name")));
  });
}

const winnow_format* winnow_cache_formats(int64_t* count) {
  static constexpr winnow_format formats[] = {WINNOW_V32_FP8,    WINNOW_V32_BF16,
                                              WINNOW_V4_FP8,     WINNOW_V4_BF16,
                                              WINNOW_INDEX_KEYS, WINNOW_INDEX_KEYS_BF16};
  if (count) *count = std::size(formats);
  return formats;
}

const int32_t* winnow_head_sizes(int64_t* count) {
  const std::span<const int32_t> sizes = winnow::head_sizes();
  if (count) *count = static_cast<int64_t>(sizes.size());
  return sizes.data();
}

bool winnow_supports_heads(int64_t heads) { return winnow::supports_heads(heads); }

winnow_status winnow_page_bytes(winnow_format format, int64_t page, int64_t* out) {
  return guarded("page_bytes", [&](const In& in) {
    in.given(out, "out") = winnow::page_bytes(checked(format, in), page);
  });
}

winnow_status winnow_page_bytes_used(winnow_format format, int64_t page, int64_t* out) {
  return guarded("page_bytes_used", [&](const In& in) {
    in.given(out, "out") = winnow::page_bytes_used(checked(format, in), page);
  });
}

winnow_status winnow_cache_shape(winnow_format format, int64_t pages, int64_t page,
                                 int64_t out[2]) {
  return guarded("cache_shape", [&](const In& in) {
    const auto shape = winnow::cache_shape(checked(format, in), pages, page);
    in.given(out, "out");
    out[0] = shape[0];
    out[1] = shape[1];
  });
}

winnow_status winnow_record_dim(winnow_format format, int32_t* out) {
  return guarded("record_dim", [&](const In& in) {
    in.given(out, "out") = winnow::record_dim(checked(format, in));
  });
}

winnow_status winnow_support_count(int64_t* count) {
  return guarded("support", [&](const In& in) {
    in.given(count, "count") = static_cast<int64_t>(kernels().size());
  });
}

winnow_status winnow_support(int64_t index, winnow_kernel_info* out) {
  return guarded("support", [&](const In& in) {
    in.check().range(index, "index", 0, static_cast<int64_t>(kernels().size()) - 1);
    const winnow::KernelInfo& k = kernels()[index];
    in.given(out, "out") = {k.stage.c_str(), k.kernel.c_str(), k.device.c_str(), k.available,
                            k.reason.c_str()};
  });
}

const char* winnow_version(void) { return winnow::version(); }

const char* winnow_cpu_name(void) {
  const char* name = nullptr;
  guarded("support", [&](const In&) {
    static std::atomic<const std::string*> text{nullptr};
    name = winnow::made_once(text, winnow::cpu_name).c_str();
  });
  return name;
}

int32_t winnow_threads(void) { return winnow::threads(); }

}  // extern "C"
