// Decode on Hopper: the part of the work that a CTA takes, a token or a range of blocks.
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
// Ranges are taken from the last one on, so that a CTA waits only for others that began before it
// (even.cuh). Read where it is used: weigh has no register for what follows from it.
__device__ __forceinline__ int range_here() {
  int block, blocks;
  asm volatile("mov.u32 %0,%%ctaid.y;\nmov.u32 %1,%%nctaid.y;" : "=r"(block), "=r"(blocks));
  return blocks - 1 - block;
}
// The first block of a range, counted over all tokens.
__device__ __forceinline__ int range_begin(const Args& args, int range) {
  return range * args.share + min(range, args.longer);
}
template <int kHeads, Way kWay = Way::kAlone>
__device__ __forceinline__ Span span_here(const Args& args) {
  Span span{};
  span.token =
      kWay == Way::kEven ? over_token_blocks(args, range_begin(args, range_here())) : token_here();
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

// The part of the token's list, of which there is one, that lies in this CTA's range. Ranges are
// counted in blocks of full lists; of a shorter list each takes the same share as of a full one, so
// that short lists are dealt out as evenly.
template <class Config>
__device__ __forceinline__ void cut_range(const Args& args, Span& span) {
  const int range = range_here();
  const int before = span.token * args.token_blocks;
  const int first = max(range_begin(args, range) - before, 0);
  const int last = min(range_begin(args, range + 1) - before, args.token_blocks);
  const ListView& list = args.lists[0];
  int positions = columns(list, span.token);
  if (!list.lengths && positions > 0) {
    const int32_t* const row = list.indices + span.token * list.index_stride;
    if (__builtin_expect(__ldg(row + positions - 1) < 0, 0))
      positions = length_without_padding(row, positions, thread_here() & 31);
  }
  span.first_list_end = span.positions = positions;
  const int blocks = ceil_div(positions, Config::kBlock);
  int begin = first;
  int end = last;
  if (blocks < args.token_blocks) {
    begin = over_token_blocks(args, first * blocks);
    end = over_token_blocks(args, last * blocks);
  }
  span.begin = min(begin * Config::kBlock, positions);
  span.end = min(end * Config::kBlock, positions);
  span.blocks = end - begin;
}
template <class Config, Way kWay>
__device__ __forceinline__ void cut(const Args& args, Span& span) {
  if constexpr (kWay == Way::kEven) cut_range<Config>(args, span);
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

// Proceeds to the second token of a range, whose part of the list is not known yet; false if there
// is none.
__device__ __forceinline__ bool enter_second_token(const Args& args, Span& span) {
  if (range_begin(args, range_here() + 1) <= (span.token + 1) * args.token_blocks) return false;
  span.token++;
  return true;
}
// The next token of a CTA that has several; false after its last one. Every role proceeds on its
// own: rows, blocks and the phases of barriers are counted over all tokens.
template <Way kWay, class Row, int kHeads>
__device__ __forceinline__ bool next_token(Smem<Row, kHeads>& smem, const Args& args, Span& span) {
  if constexpr (kWay == Way::kEven) {
    if (!enter_second_token(args, span)) return false;
    // The copying warps stored both together with the blocks of the first part.
    span.begin = 0;
    span.end = smem.next_end;
    span.blocks = __reduce_max_sync(~0u, smem.next_blocks);
  } else {
    if (args.tokens - span.token <= static_cast<int>(gridDim.y)) return false;
    span.token += static_cast<int>(gridDim.y);
    cut<ConfigOf<Row, kHeads>, kWay>(args, span);
  }
  return true;
}
// Whether this is the score warpgroup that does what is done once.
__device__ __forceinline__ bool first_scorer() { return thread_here() / 128 == 2; }

}  // namespace winnow::internal::attend::decode_sm90
