// Gathers every stage's kernel table. Beside plan and pipeline, the one place that sees all stages.
#include "winnow/support.h"

#include "absorb/kernel.h"
#include "attend/kernel.h"
#include "compress/kernel.h"
#include "core/check.h"
#include "cut/kernel.h"
#include "index_query/kernel.h"
#include "lists/kernel.h"
#include "locate/kernel.h"
#include "mask/kernel.h"
#include "merge/kernel.h"
#include "mha/kernel.h"
#include "norm/kernel.h"
#include "norm_write/kernel.h"
#include "prepare_queries/kernel.h"
#include "prepare_query/kernel.h"
#include "rotate/kernel.h"
#include "score/kernel.h"
#include "select/kernel.h"
#include "write/kernel.h"

namespace winnow {

std::vector<KernelInfo> support() try {
  std::vector<KernelInfo> out;
  list_kernels("norm", internal::norm::kernels(), out);
  list_kernels("rope_table", internal::rotate::table_kernels(), out);
  list_kernels("rotate", internal::rotate::kernels(), out);
  list_kernels("prepare_query", internal::prepare_query::kernels(), out);
  list_kernels("index_query", internal::index_query::kernels(), out);
  list_kernels("prepare_queries", internal::prepare_queries::kernels(), out);
  list_kernels("write", internal::write::kernels(), out);
  list_kernels("norm_write", internal::norm_write::kernels(), out);
  list_kernels("gather", internal::write::gather_kernels(), out);
  list_kernels("join", internal::write::join_kernels(), out);
  list_kernels("quantize", internal::write::quantize_kernels(), out);
  list_kernels("compress", internal::compress::kernels(), out);
  list_kernels("score", internal::score::kernels(), out);
  list_kernels("score_select", internal::score::kernels(), out);
  list_kernels("select", internal::select::kernels(), out);
  list_kernels("cut", internal::cut::kernels(), out);
  list_kernels("locate", internal::locate::kernels(), out);
  list_kernels("lists", internal::lists::kernels(), out);
  list_kernels("attend", internal::attend::kernels(), out);
  list_kernels("mha", internal::mha::kernels(), out);
  list_kernels("mask", internal::mask::kernels(), out);
  list_kernels("merge", internal::merge::kernels(), out);
  list_kernels("absorb", internal::absorb::kernels(), out);
  list_kernels("dequantize_weight", internal::absorb::dequantize_kernels(), out);
#ifndef WINNOW_WITH_CUDA
  // A build for the CPU says so, and why, to who expects a GPU's kernels.
  out.push_back({kEveryStage, "sm90", "cuda", false, "built without CUDA: " WINNOW_WITHOUT_CUDA});
#endif
  return out;
} catch (const std::bad_alloc&) {
  out_of_memory("support");
}

const char* version() { return WINNOW_VERSION; }

}  // namespace winnow
