// The valid columns of each token, clamped once so that hostile starts and ends are harmless.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/namespaces.h"

namespace winnow::internal::core {

struct Range {
  int64_t first = 0, last = 0;  // [first, last)
};

struct Ranges {
  const int32_t* starts = nullptr;  // null: 0
  int64_t start_stride = 0;
  const int32_t* ends = nullptr;  // null: limit
  int64_t end_stride = 0;
  int64_t limit = 0;  // columns of a row

  WINNOW_HD Range of(int64_t token) const {
    return clamp(starts ? starts[token * start_stride] : 0,
                 ends ? ends[token * end_stride] : limit);
  }
  WINNOW_HD Range clamp(int64_t start, int64_t end) const {
    Range r{start < 0 ? 0 : start, end < limit ? end : limit};
    if (r.first >= r.last) r.first = r.last = 0;
    return r;
  }
};

}  // namespace winnow::internal::core
