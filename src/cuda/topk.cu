// Top-k on Hopper: which kernel serves a call, and with how many blocks a row. Few rows: a cluster
// for each (topk_shared.cuh, or topk_stream.cuh if they are long). Many: a block each, one pass
// (topk_filter.cuh) if they are long.
#include <algorithm>

#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/topk_stream.cuh"

namespace winnow::internal::cuda {

namespace {

using namespace ranking;

// Groups of four logits that a thread holds at most, and where a block alone counts digits.
constexpr int kMostGroups = 16, kAloneGroups = 4;
namespace tuned = tuning_h200::topk;

template <class... Args>
void launch(void (*kernel)(Args...), const TopkParams& p, int blocks, size_t bytes,
            Args... args) noexcept {
  // The same limit for every call: another host thread may be between it and its launch.
  keep_error(allow_shared(kernel, kMaxSharedBytes));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = p.overlap;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  const dim3 grid(static_cast<unsigned>(p.tokens * blocks));
  cudaLaunchConfig_t config = launch_config(grid, kThreads, bytes, stream_of(p.device));
  config.attrs = attributes;
  config.numAttrs = blocks > 1 ? 2 : 1;
  keep_error(cudaLaunchKernelEx(&config, kernel, args...));
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

// Groups of four logits that a thread has with `blocks` a row. Three columns may lie between a
// 16-byte boundary and a row's first logit.
int64_t groups_of(const TopkShape& s, int blocks) {
  const int64_t lines = ceil_div(s.columns + (s.aligned ? 0 : 3), 128);
  return ceil_div(lines, blocks * kWarps);
}

// More blocks a row while all clusters still run at once (66 of 2, 30 of 4, 15 of 8 on an H200)
// and each block has a few logits a thread.
int blocks_at_once(const TopkShape& s) {
  const int64_t busy = multiprocessors(s.device);
  int blocks = 1;
  while (blocks < kMaxBlocks && s.columns / blocks > 4 * kThreads &&
         s.tokens <=
             busy / (2 * blocks) * (blocks > 1 ? tuning_h200::kClustersAtOnceElevenths : 11) / 11)
    blocks *= 2;
  return blocks;
}
int cluster_blocks(const TopkShape& s) {
  int blocks = std::max(blocks_at_once(s), 2);
  while (blocks < kMaxBlocks && groups_of(s, blocks) > kMostGroups) blocks *= 2;
  return blocks;
}
int stream_blocks(const TopkShape& s) {
  int blocks = std::max(blocks_at_once(s), 2);
  while (blocks < kMaxBlocks && s.columns / blocks > kMapColumns) blocks *= 2;
  return blocks;
}

// What a block alone lists goes by a sample of 2,048, or of 4,096 where that needs much room.
struct Filter {
  bool small;
  uint32_t room;
  size_t bytes;
};
Filter filter_of(const TopkShape& s) {
  uint32_t room = filter_room(s.width, s.columns, 2048);
  const bool small =
      room == kLeastRoom || filter_bytes(s.columns, room) <= tuned::kSharedBytesOfTwo;
  if (!small) room = filter_room(s.width, s.columns, 4096);
  return {small, room, filter_bytes(s.columns, room)};
}

}  // namespace

TopkShape shape_of(const TopkParams& p) {
  const bool moves = !p.from_start && p.ranges.starts;
  const bool aligned =
      reinterpret_cast<uintptr_t>(p.logits) % 16 == 0 && p.logit_stride % 4 == 0 && !moves;
  return {p.tokens, p.ranges.limit, p.width, aligned, p.device.index};
}

bool topk_fits(TopkForm form, const TopkShape& s) {
  switch (form) {
    case TopkForm::kDigits: return true;
    case TopkForm::kCluster: return groups_of(s, cluster_blocks(s)) <= kMostGroups;
    case TopkForm::kStream:
      return s.columns / stream_blocks(s) <= kMapColumns && s.width + kRanked <= kMostStreamRoom;
    default: return s.columns <= kMapColumns && filter_of(s).bytes <= kMaxSharedBytes;
  }
}

TopkForm fastest_topk(const TopkShape& s) {
  const int blocks = blocks_at_once(s);
  if (blocks == 1 && groups_of(s, 1) <= kAloneGroups) return TopkForm::kDigits;
  // Rows that neither a cluster's registers nor a block's list and bitmap hold are streamed.
  const bool listable = topk_fits(TopkForm::kFilter, s);
  const bool held = blocks > 1 ? groups_of(s, blocks) <= kMostGroups : listable;
  if (!held && topk_fits(TopkForm::kStream, s)) return TopkForm::kStream;
  if (blocks > 1) return topk_fits(TopkForm::kCluster, s) ? TopkForm::kCluster : TopkForm::kDigits;
  const bool few = s.width <= kLeastRoom / 2 || s.width <= s.columns / tuned::kListOneIn;
  return listable && few ? TopkForm::kFilter : TopkForm::kDigits;
}

const char* name_of(TopkForm form) {
  switch (form) {
    case TopkForm::kDigits: return "sm90/digits";
    case TopkForm::kCluster: return "sm90/cluster";
    case TopkForm::kStream: return "sm90/stream";
    default: return "sm90/filter";
  }
}

void topk(const TopkParams& p, TopkForm form) noexcept {
  if (p.tokens == 0 || p.width == 0) return;
  const TopkShape s = shape_of(p);
  if (form == TopkForm::kStream) return stream(p, stream_blocks(s));
  if (form == TopkForm::kFilter) {
    const Filter f = filter_of(s);
    return launch(f.small ? filter_kernel<4> : filter_kernel<8>, p, 1, f.bytes, p, f.room);
  }
  if (form == TopkForm::kCluster) {
    const int blocks = cluster_blocks(s);
    const int64_t groups = groups_of(s, blocks);
    if (groups <= 2) return shared_row<2>(p, blocks);
    if (groups <= 4) return shared_row<4>(p, blocks);
    if (groups <= 8) return shared_row<8>(p, blocks);
    return shared_row<kMostGroups>(p, blocks);
  }
  int blocks = blocks_at_once(s);
  if (blocks == 1 && groups_of(s, 1) <= kAloneGroups) return exact<kAloneGroups>(p, 1);
  while (blocks > 1 && blocks < kMaxBlocks && groups_of(s, blocks) > kMostGroups) blocks *= 2;
  exact<0>(p, blocks);
}

}  // namespace winnow::internal::cuda
