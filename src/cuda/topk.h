// Exact top-k of rows of logits on the device, shared by select() and score_select().
#pragma once

#include <cstdint>

#include "core/range.h"
#include "winnow/tensor.h"

namespace winnow::internal::cuda {

struct TopkParams {
  const float* logits = nullptr;
  int64_t logit_stride = 0;
  int64_t tokens = 0;
  Ranges ranges;
  bool from_start = false;  // a row's first valid logit is at column 0 instead of at its start
  int32_t* ids = nullptr;
  int64_t id_stride = 0, width = 0;
  bool relative = false;
  // The kernel before on the stream lets this one start early (griddepcontrol), and wrote nothing
  // that this one reads but the logits.
  bool overlap = false;
  Device device;
};

// Queues the selection on the stream of p.device. Semantics: select() in <winnow/select.h>.
void topk(const TopkParams& p) noexcept;

}  // namespace winnow::internal::cuda
