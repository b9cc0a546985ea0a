// Top-k on Hopper: which kernel serves a call, and with how many blocks a row. Few rows: a cluster
// for each (topk_shared.cuh). Many: a block each, one pass (topk_filter.cuh) if they are long.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/topk_filter.cuh"
#include "cuda/topk_shared.cuh"

namespace winnow::gpu {

namespace {

using namespace ranking;

template <class... Args>
void launch(void (*kernel)(Args...), const TopkParams& p, int blocks, size_t bytes,
            Args... args) noexcept {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = p.overlap;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(p.tokens * blocks), 1, 1};
  config.blockDim = {kThreads, 1, 1};
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(p.device.stream);
  config.attrs = attributes;
  config.numAttrs = blocks > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, args...);
}

template <int kGroups>
void exact(const TopkParams& p, int blocks) noexcept {
  const auto n = static_cast<unsigned>(blocks);
  if (blocks > 1) launch(exact_kernel<kGroups, true>, p, blocks, sizeof(ExactMemory), p, n);
  else launch(exact_kernel<kGroups, false>, p, blocks, kAloneBytes, p, n);
}

template <int kGroups>
void shared_row(const TopkParams& p, int blocks) noexcept {
  launch(shared_row_kernel<kGroups>, p, blocks, kSharedRowBytes<kGroups> + sizeof(ExactMemory), p,
         static_cast<unsigned>(blocks));
}

// Columns that may lie between a 16-byte boundary and a row's first logit.
int64_t most_lead(const TopkParams& p) {
  const bool moves = !p.from_start && p.ranges.starts;
  return reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logit_stride % 4 == 0 && !moves ? 0
                                                                                              : 3;
}

}  // namespace

void topk(const TopkParams& p) noexcept {
  if (p.tokens == 0 || p.width == 0) return;
  const int64_t columns = p.ranges.limit, busy = multiprocessors(p.device.index);
  const auto groups_of = [&](int blocks) {  // groups of four logits that a thread has
    const int64_t lines = (columns + most_lead(p) + 127) / 128;
    return (lines + blocks * kWarps - 1) / (blocks * kWarps);
  };
  // More blocks a row while all clusters still run at once (66 of 2, 30 of 4, 15 of 8 on an H200)
  // and each block has a few logits a thread; then until the row fits in registers.
  int blocks = 1;
  while (blocks < kMaxBlocks && columns / blocks > 4 * kThreads &&
         p.tokens <= busy / (2 * blocks) * (blocks > 1 ? 10 : 11) / 11)
    blocks *= 2;
  while (blocks > 1 && blocks < kMaxBlocks && groups_of(blocks) > 16) blocks *= 2;
  const int64_t groups = groups_of(blocks);
  if (blocks > 1) {
    if (groups <= 2) return shared_row<2>(p, blocks);
    if (groups <= 4) return shared_row<4>(p, blocks);
    if (groups <= 8) return shared_row<8>(p, blocks);
    if (groups <= 16) return shared_row<16>(p, blocks);
    return exact<0>(p, blocks);
  }
  if (groups <= 4) return exact<4>(p, blocks);
  if (columns <= kMapColumns && p.width <= kListed / 2)
    return launch(filter_kernel, p, 1, filter_bytes(columns), p);
  exact<0>(p, blocks);
}

}  // namespace winnow::gpu
