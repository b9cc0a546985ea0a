// Decode on Hopper: how a call is cut into CTAs, and into launches. Arithmetic alone, by the cost
// models of core/tuning_h200.h; decode_cuts_test.cpp runs on any machine. launch.cu asks and
// launches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend/decode_sm90/parts.h"
#include "attend/kernel.h"
#include "core/arithmetic.h"

namespace winnow::internal::attend::decode_sm90 {

// Whether CTAs of `heads` heads may take several tokens, one after the other. That is one more
// kernel to compile, so only where it gains 2 % or more. 64 heads of V3.2 gain nothing. With 64
// heads of V4, the warp that finds rows has no registers left for block tables.
constexpr bool takes_many_tokens(CacheFormat format, int heads, bool block_tables) {
  const bool v4 = format == CacheFormat::kV4Fp8;
  return (v4 || format == CacheFormat::kV32Fp8) &&
         (heads == 16 || heads == 32 || (v4 && heads == 64 && !block_tables));
}

// The most splits that meet in the workspace, and the bytes in which those of `heads` heads meet.
constexpr int kMaxExchanged = 16;
constexpr size_t exchange_bytes(int heads, int splits) {
  return kMaxExchanged * (sizeof(uint64_t) + 2 * sizeof(uint64_t) * kMaxExchanged + 128) +
         static_cast<size_t>(heads) * (4 * sizeof(float) * kMaxExchanged + splits * 1024);
}

// Whether tokens of CTAs of `heads` heads may be helped. One more kernel to compile, so only where
// tokens of many heads leave much of a wave idle.
constexpr bool takes_helpers(CacheFormat format, int heads) {
  return format == CacheFormat::kV32Fp8 && heads == 64;
}

// What a cut depends on of the GPU.
struct Gpu {
  int device;
  int multiprocessors;
  // Clusters of `size` CTAs, 1 to 16, that the device runs at once.
  int (*clusters)(int device, int size);
};

// How a call is cut: groups of heads, splits of the lists, and heads of a CTA.
struct Cut {
  int groups = 1;
  int splits = 1;
  int heads = 8;
  // Splits meet in the workspace and are no clusters.
  bool exchange = false;
  // In microseconds, by the model of cheapest_cut().
  double cost = 1e30;
};

// A call whose tokens are helped (Way::kHelped): 64 heads a CTA, as many CTAs for each of its
// groups of heads as run at once.
struct HelpedCut {
  int groups = 1;
  // Blocks of a token, its mains, the blocks of each, and helpers for each group of heads.
  int token_blocks = 0;
  int mains = 1;
  int main_blocks = 0;
  int helpers = 0;
  // Blocks below which a list is left to its mains.
  int least_helped = 0;
  // In microseconds as they are measured; where no cut is possible more than any other.
  double us = 1e30;
};
HelpedTokens helped_tokens(const HelpedCut& cut, int tokens);

// Which way a launch takes, and what it costs by the model of cheapest_cut(), which counts more
// than is measured.
struct Choice {
  Cut cut;
  HelpedCut helped;
  bool is_helped = false;
  double cost = 0;
};
// `memory`: bytes of the workspace in which splits may meet.
Choice choose(const Shape& shape, size_t memory, const Gpu& gpu);
// As first_launch() in kernel.h.
int32_t first_launch(const Shape& shape, bool wide, const Gpu& gpu);

// The workspace for any number of tokens up to the shape's: sums of all CTAs, and what is there
// once for two or more of them.
size_t workspace_bytes(const Shape& shape);

// A call whose splits meet in the workspace has at most one CTA a multiprocessor: 144 on the
// largest Hopper.
constexpr int kMostCtas = 144;
constexpr size_t kExchangeAlign = 128;

// Precision::kFp8: codes multiplied as they are stored, by CTAs of 64 heads alone.
inline bool of_codes(const Shape& shape) { return shape.precision == Precision::kFp8; }
// The kernel's rows. Two lists of different formats go to the bf16 kernel, which makes bf16 rows of
// fp8 records.
CacheFormat format_of(const Shape& shape);

}  // namespace winnow::internal::attend::decode_sm90
