// Top-k on Hopper: which of the two kernels serves a call, and with how many blocks a row.
//
// Few rows: a cluster of blocks per row counts digits (topk_exact.cuh), since latency is all there
// is. Many long rows: one block per row reads it once (topk_filter.cuh).
#include "cuda/device.h"
#include "cuda/topk_filter.cuh"

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
  // More blocks a row while multiprocessors are idle and each has a few logits a thread.
  int blocks = 1;
  while (blocks < kMaxBlocks && p.tokens * blocks * 2 <= busy && columns / blocks > 4 * kThreads)
    blocks *= 2;
  const int64_t lines = (columns + most_lead(p) + 127) / 128;  // of 32 groups
  const int64_t groups = (lines + blocks * kWarps - 1) / (blocks * kWarps);
  if (blocks == 1 && columns > 8192 && columns <= kMapColumns && p.width <= kListed / 2)
    return launch(filter_kernel, p, 1, filter_bytes(columns), p);
  if (groups <= 2) return exact<2>(p, blocks);
  if (groups <= 4) return exact<4>(p, blocks);
  if (groups <= 8) return exact<8>(p, blocks);
  if (groups <= 16) return exact<16>(p, blocks);
  exact<0>(p, blocks);
}

}  // namespace winnow::gpu
