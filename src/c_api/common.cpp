#include "c_api/common.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "winnow/error.h"

namespace winnow::internal::c_api {

namespace {

// C's numbers are the C++ enumerators; the last of each group pins the group.
static_assert(int(DType::kBf16) == WINNOW_BF16 && int(DType::kU8) == WINNOW_U8);
static_assert(int(CacheFormat::kV32Fp8) == WINNOW_V32_FP8 &&
              int(CacheFormat::kIndexKeysBf16) == WINNOW_INDEX_KEYS_BF16);
static_assert(int(DeviceKind::kCuda) == WINNOW_CUDA);
static_assert(int(ErrorCode::kInvalidArgument) == WINNOW_INVALID_ARGUMENT &&
              int(ErrorCode::kUnsupported) == WINNOW_UNSUPPORTED &&
              int(ErrorCode::kRuntime) == WINNOW_RUNTIME);

// A thread's string is destroyed before the process runs its atexit() handlers and static
// destructors, which may still call winnow and ask why a call failed. From then on messages are
// kept in plain memory, cut to its size.
thread_local char late_error[512] = "";
thread_local bool string_is_gone = false;

struct LastError {
  std::string text;
  LastError() = default;
  LastError(const LastError&) = delete;
  LastError& operator=(const LastError&) = delete;
  ~LastError() {
    keep_late(text.c_str());
    string_is_gone = true;
  }
  static void keep_late(const char* message) noexcept {
    std::snprintf(late_error, sizeof(late_error), "%s", message);
  }
};
thread_local LastError last_error;

winnow_status keep(winnow_status status, const char* message) noexcept {
  if (string_is_gone) {
    LastError::keep_late(message);
    return status;
  }
  try {
    last_error.text = message;
  } catch (const std::bad_alloc&) {
    last_error.text.clear();  // no memory even for the message
  }
  return status;
}

const char* message_of_last_error() noexcept {
  return string_is_gone ? late_error : last_error.text.c_str();
}

}  // namespace

winnow_status failed() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    return keep(static_cast<winnow_status>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return keep(WINNOW_RUNTIME, "out of memory");
  } catch (const std::exception& e) {
    return keep(WINNOW_RUNTIME, e.what());
  } catch (...) {
    return keep(WINNOW_RUNTIME, "unknown error");
  }
}

Tensor In::operator()(const winnow_tensor& t, const char* argument) const {
  // No rank but data: a field forgotten, not a tensor that is not given.
  const int32_t least = t.data ? 1 : 0;
  if (t.rank < least || t.rank > 4)
    check_.range(t.rank, std::string(cat(argument, ".rank")).c_str(), least, 4);
  Tensor r{t.data, choice(t.dtype, argument, DType::kU8, ".dtype"), t.rank};
  std::copy_n(t.shape, t.rank, r.shape.begin());
  std::copy_n(t.stride, t.rank, r.stride.begin());
  return r;
}

Cache In::operator()(const winnow_cache& c, const char* argument) const {
  // Data but no page: a field forgotten as well. Optional caches would count as not given.
  if (c.data && c.page < 1)
    check_.range(c.page, std::string(cat(argument, ".page")).c_str(), 1, INT32_MAX);
  return {c.data, choice(c.format, argument, CacheFormat::kIndexKeysBf16, ".format"), c.pages,
          c.page, c.page_stride};
}

Target In::operator()(const winnow_target& t) const {
  const auto kind = choice(t.device.kind, "target.device.kind", DeviceKind::kCuda);
  return {{kind, t.device.index, t.device.stream}, t.kernel};
}

std::span<const int32_t> In::operator()(const winnow_ints& v, const char* argument) const {
  return out(v.data, v.count, argument);
}

}  // namespace winnow::internal::c_api

extern "C" const char* winnow_last_error(void) {
  return winnow::internal::c_api::message_of_last_error();
}
