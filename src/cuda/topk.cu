// Top-k on Hopper: which kernel serves a call, and with how many blocks a row. Few rows: a cluster
// for each (topk_shared.cuh, or topk_stream.cuh if they are long). Many: a block each, one pass
// (topk_filter.cuh) if they are long.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/topk_stream.cuh"

namespace winnow::internal::cuda {

namespace {

using namespace ranking;

constexpr int kMostGroups = 16;             // of four logits, that a thread holds
constexpr size_t kMostShared = 227 * 1024;  // bytes a block may have
constexpr size_t kFairShared = 81 * 1024;   // and one of two that leave 92 KB of cache to loads

template <class... Args>
void launch(void (*kernel)(Args...), const TopkParams& p, int blocks, size_t bytes,
            Args... args) noexcept {
  // The same limit for every call: another host thread may be between it and its launch.
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(kMostShared));
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
  launch(shared_row_kernel<kGroups>, p, blocks, kSharedRowBytes<kGroups> + sizeof(ExactMemory), p);
}

void stream(const TopkParams& p, int blocks) noexcept {
  const uint32_t room = stream_room(p.width, p.ranges.limit, blocks);
  launch(stream_kernel, p, blocks, stream_bytes(p.ranges.limit + 3, blocks, room), p, room);
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
  // and each block has a few logits a thread.
  int blocks = 1;
  while (blocks < kMaxBlocks && columns / blocks > 4 * kThreads &&
         p.tokens <= busy / (2 * blocks) * (blocks > 1 ? 10 : 11) / 11)
    blocks *= 2;
  if (blocks == 1 && groups_of(1) <= 4) return exact<4>(p, 1);
  // What a block alone lists goes by a sample of 2,048, or of 4,096 where that needs much room.
  uint32_t room = filter_room(p.width, columns, 2048);
  const bool small = room == kLeastRoom || filter_bytes(columns, room) <= kFairShared;
  if (!small) room = filter_room(p.width, columns, 4096);
  const size_t bytes = filter_bytes(columns, room);
  const bool listable = columns <= kMapColumns && bytes <= kMostShared;
  // Rows that neither a cluster's registers nor a block's list and bitmap hold are streamed.
  if (blocks > 1 ? groups_of(blocks) > kMostGroups : !listable) {
    int streaming = std::max(blocks, 2);
    while (streaming < kMaxBlocks && columns / streaming > kMapColumns) streaming *= 2;
    if (columns / streaming <= kMapColumns && p.width + kRanked <= kMostStreamRoom)
      return stream(p, streaming);
  }
  while (blocks > 1 && blocks < kMaxBlocks && groups_of(blocks) > kMostGroups) blocks *= 2;
  const int64_t groups = groups_of(blocks);
  if (blocks > 1) {
    if (groups <= 2) return shared_row<2>(p, blocks);
    if (groups <= 4) return shared_row<4>(p, blocks);
    if (groups <= 8) return shared_row<8>(p, blocks);
    if (groups <= kMostGroups) return shared_row<kMostGroups>(p, blocks);
    return exact<0>(p, blocks);
  }
  // Digits are as fast where more than a quarter of a row is wanted.
  if (listable && (p.width <= kLeastRoom / 2 || p.width <= columns / 4))
    return launch(small ? filter_kernel<4> : filter_kernel<8>, p, 1, bytes, p, room);
  exact<0>(p, blocks);
}

}  // namespace winnow::internal::cuda
