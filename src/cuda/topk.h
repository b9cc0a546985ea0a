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
  float* values = nullptr;  // the logits at the ids, -inf where there is none; may be null
  int64_t value_stride = 0;
  bool relative = false;
  // The kernel before on the stream lets this one start early (griddepcontrol), and wrote nothing
  // that this one reads but the logits.
  bool overlap = false;
  Device device;
};

// The kernels, by how they hold a row of logits.
enum class TopkForm : uint8_t {
  kDigits,   // in registers or re-read: by the digits of the keys (topk_exact.cuh)
  kCluster,  // in the registers of a cluster (topk_shared.cuh)
  kStream,   // nowhere: a cluster streams a long row once (topk_stream.cuh)
  kFilter,   // what may be chosen, in a block's shared memory: one pass (topk_filter.cuh)
};
struct TopkShape {
  int64_t tokens = 1, columns = 0, width = 0;
  bool aligned = true;  // every row's first logit lies on a 16-byte boundary
  int device = 0;
};
TopkShape shape_of(const TopkParams& p);

bool topk_fits(TopkForm form, const TopkShape& shape);
TopkForm fastest_topk(const TopkShape& shape);
const char* name_of(TopkForm form);  // as select's table has it

// Queues the selection on the stream of p.device. Semantics: select() in <winnow/select.h>. The
// form must fit.
void topk(const TopkParams& p, TopkForm form) noexcept;

}  // namespace winnow::internal::cuda
