// Top-k inside blocks of columns, and the best blocks, on the device: V4.1's two levels.
#pragma once

#include "cuda/topk.h"

namespace winnow::internal::cuda {

struct BlockParams {
  int32_t size = 8;  // columns of a block
  const int32_t* within = nullptr;
  int64_t within_stride = 0, within_count = 0;
  int32_t* best = nullptr;
  int64_t best_stride = 0, best_count = 0;
  bool restricts = false, finds = false;
};

// Semantics: SelectBlocks in <winnow/select.h>. Ids, from the blocks that `within` names or,
// without it, from whole rows; and the best blocks where they are requested. Any row fits.
void topk_in_blocks(const TopkParams& rows, const BlockParams& blocks) noexcept;

}  // namespace winnow::internal::cuda
