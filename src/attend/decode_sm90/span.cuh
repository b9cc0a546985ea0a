// Decode on Hopper: the part of the work that a CTA takes.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// What a CTA works on: a token, the first of its heads and how many of kHeads exist; where the
// positions of the second list begin; this split's positions [begin, end), in blocks.
struct Span {
  int token, head_begin, head_count;
  int first_list_end, positions;
  int begin, end, blocks;
};

// The token and heads that a CTA begins with. Clusters take the groups of a token's heads first.
// The grid is (groups x splits, tokens up to kTokensY, the rest of the tokens), so that no division
// comes before the first load.
constexpr int kTokensY = 32768;
__device__ __forceinline__ int token_here() {
  return static_cast<int>(blockIdx.z) * kTokensY + static_cast<int>(blockIdx.y);
}
// The CTA's split, which is its rank in a cluster.
__device__ __forceinline__ int split_here(const Args& args) {
  return static_cast<int>(blockIdx.x - over_splits(args, blockIdx.x) * args.splits);
}
// Of helped tokens the mains come first, those of a token side by side, then the helpers. They are
// taken from the last one on, since mains wait for helpers (helped.cuh). Read where it is used:
// weigh has no register for what follows from it.
__device__ __forceinline__ int range_here() {
  int block, blocks;
  asm volatile("mov.u32 %0,%%ctaid.y;\nmov.u32 %1,%%nctaid.y;" : "=r"(block), "=r"(blocks));
  return blocks - 1 - block;
}
// The same as parts.h takes it.
struct RangeHere {
  __device__ __forceinline__ int operator()() const { return range_here(); }
};
// What a CTA begins with.
__device__ __forceinline__ Part first_part_here(const Args& args) {
  return first_part(args, RangeHere{});
}
// A helper's part of a later token, empty where it has none.
__device__ __forceinline__ Part later_part_here(const Args& args, int token) {
  return later_part(args, RangeHere{}, token);
}
template <int kHeads, Way kWay = Way::kAlone>
__device__ __forceinline__ Span span_here(const Args& args) {
  Span span{};
  span.token = kWay == Way::kHelped ? first_part_here(args).token : token_here();
  span.head_begin = static_cast<int>(over_splits(args, blockIdx.x)) * kHeads;
  span.head_count = min(args.heads - span.head_begin, kHeads);
  return span;
}

// This split's part of the token's lists; or all of them in less code, where CTAs go from token to
// token. (With two score warpgroups that would spill a register.)
template <class Config, bool kSplit>
__device__ __forceinline__ void cut_list(const Args& args, Span& span) {
  span.first_list_end = span.positions = columns(args.lists[0], span.token);
  if (args.list_count > 1) span.positions += columns(args.lists[1], span.token);
  if constexpr (!kSplit) {
    span.end = span.positions;
    span.blocks = ceil_div(span.positions, Config::kBlock);
    return;
  }
  const unsigned split = split_here(args);
  // At most 2^25 blocks and 16 splits.
  const unsigned blocks = ceil_div(static_cast<unsigned>(span.positions), Config::kBlock);
  const unsigned first = over_splits(args, blocks * split);
  const unsigned last = over_splits(args, blocks * (split + 1));
  span.begin = static_cast<int>(first) * Config::kBlock;
  span.blocks = static_cast<int>(last - first);
  span.end = min(span.positions, span.begin + span.blocks * Config::kBlock);
}

// Positions of a token's list, of which there is one, without the invalid ones at its end; by a
// warp.
__device__ __forceinline__ int list_length(const Args& args, int token, int lane) {
  const ListView& list = args.lists[0];
  const int positions = columns(list, token);
  if (list.lengths || positions == 0) return positions;
  const int32_t* const row = list.indices + token * list.index_stride;
  if (__builtin_expect(__ldg(row + positions - 1) >= 0, 1)) return positions;
  return length_without_padding(row, positions, lane);
}
// What a CTA begins with of the token's list.
template <class Config>
__device__ __forceinline__ void cut_first_part(const Args& args, Span& span) {
  const int positions = list_length(args, span.token, thread_here() & 31);
  span.first_list_end = span.positions = positions;
  const Positions cut = positions_of(args, first_part_here(args), RangeHere{}, positions);
  span.begin = cut.begin;
  span.end = cut.end;
  span.blocks = ceil_div(cut.end - cut.begin, Config::kBlock);
}
// What a CTA begins with, for the roles that do not copy it; by one thread.
template <class Row, int kHeads>
__device__ __forceinline__ void tell_first_part(Smem<Row, kHeads>& smem, const Args& args,
                                                const Span& span) {
  smem.part[span.token % kMostHelperParts] = {span.begin, span.end};
  smem.unhelped = left_to_mains(args, span.positions);
}
// A helper's part of a later token, for all roles; by a copying warp while its first indices are on
// their way.
template <class Row, int kHeads>
__device__ __forceinline__ void tell_later_part(Smem<Row, kHeads>& smem, const Args& args,
                                                int token) {
  if (range_here() < args.main_ctas) return;
  const Part part = later_part_here(args, token);
  if (part.first == part.last) return;
  const int lane = thread_here() & 31;
  const Positions cut = positions_of(args, part, RangeHere{}, list_length(args, token, lane));
  if (lane == 0) smem.part[token % kMostHelperParts] = cut;
}
template <class Config, Way kWay>
__device__ __forceinline__ void cut(const Args& args, Span& span) {
  if constexpr (kWay == Way::kHelped) cut_first_part<Config>(args, span);
  else cut_list<Config, kWay != Way::kMany || Config::kScoreWarpgroups == 2>(args, span);
}

// The last index of a split, requested early. Where lengths end the lists, or there are two lists,
// nothing is trimmed and 0 stands for an index.
__device__ __forceinline__ int last_index(const Args& args, const Span& span) {
  const ListView& list = args.lists[0];
  if (args.list_count > 1 || list.lengths || span.blocks == 0) return 0;
  return __ldg(list.indices + span.token * list.index_stride + (span.end - 1));
}
// Leaves out the invalid entries at the end of a split.
template <class Config>
__device__ __forceinline__ void trim(const Args& args, Span& span, int last) {
  if (__builtin_expect(last >= 0, 1)) return;
  const int32_t* list = args.lists[0].indices + span.token * args.lists[0].index_stride;
  span.end = span.begin +
             length_without_padding(list + span.begin, span.end - span.begin, thread_here() & 31);
  span.blocks = ceil_div(span.end - span.begin, Config::kBlock);
}

// The blocks of a CTA's first token, for the roles that do not copy it.
template <Way kWay, class Row, int kHeads>
__device__ __forceinline__ void count_blocks(Smem<Row, kHeads>& smem, const Args& args,
                                             Span& span) {
  if constexpr (kWay == Way::kMany) {
    cut<ConfigOf<Row, kHeads>, kWay>(args, span);
  } else {
    mb_wait(&smem.blocks_counted, 0);
    // All lanes have the same; the reduction puts it into a uniform register.
    span.blocks = __reduce_max_sync(~0u, smem.blocks);
  }
}

// The next token of a CTA that has several; false after its last one. Every role proceeds on its
// own: rows, blocks and the phases of barriers are counted over all tokens.
template <Way kWay, class Row, int kHeads>
__device__ __forceinline__ bool next_token(Smem<Row, kHeads>& smem, const Args& args, Span& span) {
  using Config = ConfigOf<Row, kHeads>;
  if constexpr (kWay == Way::kHelped) {
    if (range_here() < args.main_ctas) return false;
    const Part part = later_part_here(args, span.token + 1);
    if (part.first == part.last) return false;
    span.token++;
    const Positions cut = smem.part[span.token % kMostHelperParts];
    span.begin = cut.begin;
    span.end = cut.end;
    span.blocks = __reduce_max_sync(~0u, ceil_div(cut.end - cut.begin, Config::kBlock));
  } else {
    if (args.tokens - span.token <= static_cast<int>(gridDim.y)) return false;
    span.token += static_cast<int>(gridDim.y);
    cut<Config, kWay>(args, span);
  }
  return true;
}
// Whether this is the score warpgroup that does what is done once.
__device__ __forceinline__ bool first_scorer() { return thread_here() / 128 == 2; }

}  // namespace winnow::internal::attend::decode_sm90
