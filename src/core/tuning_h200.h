// Constants of the cost models and crossover points, as measured on one H200 (132 multiprocessors).
// They choose between forms of a call, so a wrong one costs time. Each has its unit and where it
// comes from: the commit that brought the value, and the command, where the commit, the docs or the
// journal record one. "No command recorded" means that none of them does.
#pragma once

#include <cstdint>

#include "core/namespaces.h"

namespace winnow::internal::core::tuning_h200 {

// ---- attend: decode (src/attend/decode_sm90/launch.cu) ------------------------------------------
// The model: a CTA takes kCtaUs + heads * kCtaUsPerHead + blocks * block time, in waves; splits add
// a merge. docs/journal/decode-sm90.md, "The cut", compares its choice with all others.
namespace decode {

// us, one block of 64 rows in a CTA of 32 heads or fewer, and of more heads. 54fe7a5; no command
// recorded.
inline constexpr double kBlockUsFewHeads = 1.85;
inline constexpr double kBlockUs = 2.4;
// us, start and end of a CTA: fixed, and for each head. 54fe7a5; no command recorded.
inline constexpr double kCtaUs = 5;
inline constexpr double kCtaUsPerHead = 1 / 8.0;
// us, merge of the splits of a cluster: fixed, and for each head. 54fe7a5; no command
// recorded.
inline constexpr double kMergeUs = 1.5;
inline constexpr double kMergeUsPerHead = 1 / 32.0;
// us for each CTA of a launch. 54fe7a5; no command recorded.
inline constexpr double kUsPerCta = 0.002;
// us, merge of splits that meet in the workspace, with 64 heads a CTA and with fewer. Larger sums
// take longer, but the block time above is of many blocks and too long for the few of a split.
// 2c79b11; no command recorded. 49b02bb compared the choice in a sweep over 1 to 32 tokens and 16
// to 128 heads (docs/journal/decode-sm90.md).
inline constexpr double kExchangeUs64Heads = 0.5;
inline constexpr double kExchangeUs = 1.7;

// Rows that a CTA takes at most, one token after the other, where a token's heads are in groups:
// the groups drift apart until one no longer finds the other's rows in the L2. 62 tokens of 2,048
// rows are 3 % slower in one CTA than apart, 4 tokens 3 % faster. 94ce088, prefill of 4,096 tokens
// from fp8 pages; no command recorded.
inline constexpr int64_t kMostRowsOfGroups = 16384;

// The last wave in a second launch. No command is recorded for the single values; what they achieve
// was measured with `winnow bench attend --set batches --device cuda --cache cold --kernel sm90` at
// 849cc39 (docs/decode-sm90.md).
// us, what a second launch adds: after the decode kernel, and after the wide kernel, whose
// successor's code is in no cache. 8205b1e.
inline constexpr double kLaunchUsAfterDecode = 3;
inline constexpr double kLaunchUsAfterWide = 15;
// us, how much earlier a later token begins where CTAs go from token to token. 8205b1e.
inline constexpr double kNextTokenEarlierUs = 10;
// us, the wide kernel's time for a token and 64 heads: fixed, and for each block. c8c672f.
inline constexpr double kWideTokenUs = 3;
inline constexpr double kWideBlockUs = 1.6;
// A ratio: the second launch must promise less than this part of the time in one launch. A gain
// below a tenth is none where lists are not full: 1,024 new tokens of 2k would lose 4 %. 04f7754.
inline constexpr double kWorthSecondLaunch = 0.9;

}  // namespace decode

// ---- attend: wide (src/attend/wide_sm90/launch.cu) ----------------------------------------------
namespace wide {

// Positions of a cache above which V3.2's rows are taken in sweeps: the L2 holds fewer (32k rows,
// 38 MB, take as long either way). bd62585; no command recorded.
inline constexpr int64_t kSweepPositions = 40960;

// Quarters of the multiprocessors that a call's items (a token and 64 heads) must fill for the wide
// kernel to be faster than decode over bf16 rows: with more than 32 heads, and with 32 or fewer,
// which it pads to 64. Top-k 2,048, us of wide against decode: 64 tokens of 128 heads 71 / 124, 128
// of 64 heads 92 / 131, 112 of 32 heads 83 / 86, 4,096 of 16 heads 1,895 / 2,653. 04f7754; no
// command recorded.
inline constexpr int kQuarters = 2;
inline constexpr int kQuartersFewHeads = 3;

}  // namespace wide

}  // namespace winnow::internal::core::tuning_h200
