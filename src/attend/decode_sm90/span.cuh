// Decode on Hopper: the part of the work that a CTA takes. Every role finds its token and heads
// from the CTA's index by itself, since roles share no registers; what takes much code, such as
// where a padded list ends, a copying warp finds and publishes in shared memory.
#pragma once

#include "attend/decode_sm90/layout.cuh"

namespace winnow::internal::attend::decode_sm90 {

// What a CTA works on. Positions count through both lists of a token.
struct Span {
  // The token, the first of its heads, and how many of the CTA's kHeads heads exist.
  int token, head_begin, head_count;
  // Where the second list begins, and where it ends.
  int first_list_end, positions;
  // The CTA's positions [begin, end), and the blocks of 64 that they fill.
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
// Way::kHelped: the CTA's number in its group of heads, as parts.h counts: mains first, those of a
// token side by side, then the helpers. The grid's first CTA has the last number, because mains
// wait for helpers, which must have been launched before them (helped.cuh). It is read anew
// wherever it is used: weigh has no register to keep it.
__device__ __forceinline__ int cta_number() {
  int block, blocks;
  asm volatile("mov.u32 %0,%%ctaid.y;\nmov.u32 %1,%%nctaid.y;" : "=r"(block), "=r"(blocks));
  return blocks - 1 - block;
}
// The same as a function object for parts.h.
struct CtaNumber {
  __device__ __forceinline__ int operator()() const { return cta_number(); }
};
// Whether the CTA is a main, one of its token's own CTAs; else it helps.
__device__ __forceinline__ bool is_main(const Args& args) { return cta_number() < args.main_ctas; }
// The part that a CTA begins with.
__device__ __forceinline__ Part first_part_here(const Args& args) {
  return first_part(args, CtaNumber{});
}
// A helper's part of a later token, empty where it has none.
__device__ __forceinline__ Part later_part_here(const Args& args, int token) {
  return later_part(args, CtaNumber{}, token);
}
template <int kHeads, Way kWay = Way::kAlone>
__device__ __forceinline__ Span span_here(const Args& args) {
  Span span{};
  span.token = kWay == Way::kHelped ? first_part_here(args).token : token_here();
  span.head_begin = static_cast<int>(over_splits(args, blockIdx.x)) * kHeads;
  span.head_count = min(args.heads - span.head_begin, kHeads);
  return span;
}

// Sets this split's part of the token's lists; or all of them, which takes less code, where CTAs go
// from token to token (kSplit false; with two score warpgroups that form would spill a register).
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

// Way::kHelped, whose calls have one list: its positions without the padding at its end. By a warp.
__device__ __forceinline__ int list_length(const Args& args, int token, int lane) {
  const ListView& list = args.lists[0];
  const int positions = columns(list, token);
  if (list.lengths || positions == 0) return positions;
  const int32_t* const row = list.indices + token * list.index_stride;
  if (__builtin_expect(__ldg(row + positions - 1) >= 0, 1)) return positions;
  return length_without_padding(row, positions, lane);
}
// Sets the first part that a CTA of helped tokens takes of its token's list. By a warp.
template <class Config>
__device__ __forceinline__ void cut_first_part(const Args& args, Span& span) {
  const int positions = list_length(args, span.token, thread_here() & 31);
  span.first_list_end = span.positions = positions;
  const Positions cut = positions_of(args, first_part_here(args), CtaNumber{}, positions);
  span.begin = cut.begin;
  span.end = cut.end;
  span.blocks = ceil_div(cut.end - cut.begin, Config::kBlock);
}
// Publishes it for the roles that do not copy rows. By one thread.
template <class Row, int kHeads>
__device__ __forceinline__ void publish_first_part(Smem<Row, kHeads>& smem, const Args& args,
                                                   const Span& span) {
  smem.part[span.token % kMostHelperParts] = {span.begin, span.end};
  smem.unhelped = left_to_mains(args, span.positions);
}
// Publishes a helper's part of a later token for all roles. By a copying warp, while its first
// indices are on their way.
template <class Row, int kHeads>
__device__ __forceinline__ void publish_later_part(Smem<Row, kHeads>& smem, const Args& args,
                                                   int token) {
  if (is_main(args)) return;
  const Part part = later_part_here(args, token);
  if (part.first == part.last) return;
  const int lane = thread_here() & 31;
  const Positions cut = positions_of(args, part, CtaNumber{}, list_length(args, token, lane));
  if (lane == 0) smem.part[token % kMostHelperParts] = cut;
}
template <class Config, Way kWay>
__device__ __forceinline__ void cut(const Args& args, Span& span) {
  if constexpr (kWay == Way::kHelped) cut_first_part<Config>(args, span);
  else cut_list<Config, kWay != Way::kMany || Config::kScoreWarpgroups == 2>(args, span);
}

// The last index of a split, requested early; 0, a valid one, where trim() has nothing to do: where
// lengths end the lists, or there are two lists.
__device__ __forceinline__ int last_index(const Args& args, const Span& span) {
  const ListView& list = args.lists[0];
  if (args.list_count > 1 || list.lengths || span.blocks == 0) return 0;
  return __ldg(list.indices + span.token * list.index_stride + (span.end - 1));
}
// Leaves out the padding (-1) at the end of a split whose last index is `last`. By a warp.
template <class Config>
__device__ __forceinline__ void trim(const Args& args, Span& span, int last) {
  if (__builtin_expect(last >= 0, 1)) return;
  const int32_t* list = args.lists[0].indices + span.token * args.lists[0].index_stride;
  span.end = span.begin +
             length_without_padding(list + span.begin, span.end - span.begin, thread_here() & 31);
  span.blocks = ceil_div(span.end - span.begin, Config::kBlock);
}

// Sets the blocks of a CTA's first token, for the roles that do not copy rows.
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

// Moves to the next token of a CTA that walks(); false after its last one. Every role proceeds on
// its own: rows, blocks and the phases of barriers are counted over all tokens.
template <Way kWay, class Row, int kHeads>
__device__ __forceinline__ bool next_token(Smem<Row, kHeads>& smem, const Args& args, Span& span) {
  using Config = ConfigOf<Row, kHeads>;
  if constexpr (kWay == Way::kHelped) {
    if (is_main(args)) return false;
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
// Whether this is the first score warpgroup, which does what is done once.
__device__ __forceinline__ bool first_scorer() {
  return thread_here() / 128 == kFirstScoreWarpgroup;
}

}  // namespace winnow::internal::attend::decode_sm90
