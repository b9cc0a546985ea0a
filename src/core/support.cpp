// Gathers every stage's kernel table. Beside plan and pipeline, the one place that sees all stages.
#include "winnow/support.h"

#include "absorb/kernel.h"
#include "attend/kernel.h"
#include "attend/mask_kernel.h"
#include "attend/merge_kernel.h"
#include "attend/mha_kernel.h"
#include "locate/kernel.h"
#include "plan/kernel.h"
#include "score/kernel.h"
#include "select/kernel.h"
#include "write/kernel.h"

namespace winnow {

std::vector<KernelInfo> support() {
  std::vector<KernelInfo> out;
  list_kernels("write", storage::kernels(), out);
  list_kernels("gather", storage::gather_kernels(), out);
  list_kernels("join", storage::join_kernels(), out);
  list_kernels("quantize", storage::quantize_kernels(), out);
  list_kernels("score", scoring::kernels(), out);
  list_kernels("score_select", scoring::kernels(), out);
  list_kernels("select", selection::kernels(), out);
  list_kernels("locate", location::kernels(), out);
  list_kernels("lists", lists::kernels(), out);
  list_kernels("attend", attention::kernels(), out);
  list_kernels("mha", mha::kernels(), out);
  list_kernels("mask", masking::kernels(), out);
  list_kernels("merge", merging::kernels(), out);
  list_kernels("absorb", absorption::kernels(), out);
  list_kernels("dequantize_weight", absorption::dequantize_kernels(), out);
  return out;
}

const char* version() { return WINNOW_VERSION; }

}  // namespace winnow
