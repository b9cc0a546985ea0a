// Constants of the cost models and crossover points, as measured on one H200 (132 multiprocessors).
// A wrong one costs time. Each has its unit, the commit that brought the value, and the command
// that is on record. Where none is ("no command recorded"), `winnow bench STAGE --device cuda
// --cache cold`, of attend with --set batches and --set flashmla, shows what the value achieves.
#pragma once

#include <cstdint>

#include "core/namespaces.h"

namespace winnow::internal::core::tuning_h200 {

// Elevenths of the multiprocessors that clusters of more than two blocks find free: 30 clusters of
// four run at once where 33 would have room by count, and 15 of eight where 16 would. b5b108a; no
// command recorded.
inline constexpr int64_t kClustersAtOnceElevenths = 10;

// ---- attend: decode (src/attend/decode_sm90/cut.cpp) -------------------------------------------
// The model: a CTA takes kCtaUs + heads * kCtaUsPerHead + blocks * block time, in waves; splits add
// a merge. docs/journal/decode-sm90.md, "The cut", compares its choice with all others.
namespace decode {

// us, one block of 64 rows in a CTA of 32 heads or fewer, and of more heads. 54fe7a5; no command
// recorded.
inline constexpr double kBlockUsFewHeads = 1.85;
inline constexpr double kBlockUs = 2.4;
// us, the same of 64 heads whose products are of e4m3 (Precision::kFp8), by the same measure.
inline constexpr double kBlockUsOfCodes = 2.0;
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
// 849cc39 (docs/decode-sm90-speed.md).
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

// Tokens with helpers (Way::kHelped), 64 heads a CTA, us. Start, end and adding up parts, where a
// token has two groups of heads, which share the rows that are read, and where it has one; what two
// mains need longer than one; a block; a helper's hand-over, and its step to a next part. Fitted to
// four cuts each of 22 to 50 tokens of 128 heads and 44 to 96 of 64, top-k 2,048, builds in turns
// (docs/journal/decode-sm90.md, "helpers").
inline constexpr double kHelpedUs = 15.1;
inline constexpr double kHelpedUsOneGroup = 17.7;
inline constexpr double kTwoMainsUs = 1.2;
inline constexpr double kHelpedBlockUs = 2.15;
inline constexpr double kHandOverUs = 5.2;
inline constexpr double kNextPartUs = 3.5;
// us, what a main needs for helpers' parts: as far as it decides below which length a list is left
// to the mains. By lists of 500 of 2,048 entries.
inline constexpr double kAddPartsUs = 2;
// The part of another cut's cost by the model below which tokens are helped: of splits, which
// leaves a gain of some 3 %, and of whole tokens, some 5 % with full lists, since short ones lose.
// And what is measured for a CTA of 64 heads and all rows, as a part of its cost by the model; and
// the blocks that a token must have: with 16 and fewer even ranges, the form before this one, were
// slower.
inline constexpr double kWorthHelpOfSplits = 0.95;
inline constexpr double kWorthHelp = 0.79;
inline constexpr double kMeasuredOfModel = 0.86;
inline constexpr int kHelpedBlocks = 24;

}  // namespace decode

// ---- attend: wide (src/attend/wide_sm90/launch.cu) ----------------------------------------------
namespace wide {

// Positions of a cache above which V3.2's rows are taken in sweeps: the L2 holds fewer (32k rows,
// 38 MB, take as long either way). bd62585; no command recorded.
inline constexpr int64_t kSweepPositions = 40960;
// And items that a CTA must have on average: the first is taken as given, so that of two only one
// could gain. docs/journal/prefill-sm90.md, "the start and the output once more".
inline constexpr int kSweepItems = 2;

// Quarters of the multiprocessors that a call's items (a token and 64 heads) must fill for the wide
// kernel to be faster than decode over bf16 rows: with more than 32 heads, and with 32 or fewer,
// which it pads to 64. Top-k 2,048, us of wide against decode: 64 tokens of 128 heads 71 / 124, 128
// of 64 heads 92 / 131, 112 of 32 heads 83 / 86, 4,096 of 16 heads 1,895 / 2,653. 04f7754; no
// command recorded.
inline constexpr int kQuarters = 2;
inline constexpr int kQuartersFewHeads = 3;

}  // namespace wide

// ---- plan: the route of a prefill (src/plan/route.cpp) ------------------------------------------
// New tokens from which a route is faster than the ones before it, for one request with the row's
// context: reading gathered rows, and attention per head. Found between the two measured sizes
// around the crossing. 591c8b6, measured at cd59a2a with `winnow bench plan --set routes --device
// cuda --cache cold`, top-k 2,048, one request of 16, 64, 256, 1,024 or 4,096 new tokens;
// route_bench.cpp says what is counted, docs/prefill-sm90.md shows the times.
namespace route {

inline constexpr int32_t kNever = INT32_MAX;
// All three in tokens.
struct Crossover {
  int32_t context, gathered, mha;
};

// V3.2 by heads. With 32 heads gathering saves 3 % at most, with 16 nothing: not worth its
// workspace.
inline constexpr Crossover kV32Heads128[] = {
    {256, 173, 53},     {1024, 74, 135},     {2048, 52, 175},      {4096, 48, 583},
    {8192, 52, kNever}, {16384, 60, kNever}, {65536, 206, kNever},
};
inline constexpr Crossover kV32Heads64[] = {
    {256, kNever, 62},   {1024, 172, 123},     {2048, 164, 172},     {4096, 148, 588},
    {8192, 152, kNever}, {16384, 179, kNever}, {65536, 456, kNever},
};
inline constexpr Crossover kV32Heads32[] = {
    {256, kNever, 72},   {1024, kNever, 122},     {2048, kNever, 143},     {4096, kNever, 328},
    {8192, kNever, 834}, {16384, kNever, kNever}, {65536, kNever, kNever},
};
inline constexpr Crossover kV32Heads16[] = {
    {256, kNever, 146},  {1024, kNever, 121},   {2048, kNever, 137},     {4096, kNever, 307},
    {8192, kNever, 600}, {16384, kNever, 1609}, {65536, kNever, kNever},
};
// V4: 128 heads with 1,024 compressed states, 64 with 512.
inline constexpr Crossover kV4Heads128[] = {
    {4096, 38, kNever}, {16384, 41, kNever}, {65536, 58, kNever}};
inline constexpr Crossover kV4Heads64[] = {
    {4096, 150, kNever}, {16384, 157, kNever}, {65536, 213, kNever}};

// Heads from which a call is nearer, in factors of two, to the table of 128 heads than to that of
// 64 (above 64 * sqrt 2), to 64 than to 32, and to 32 than to 16. Arithmetic, not measured.
inline constexpr int32_t kNear128Heads = 91;
inline constexpr int32_t kNear64Heads = 46;
inline constexpr int32_t kNear32Heads = 23;

// Heads from which a balanced plan routes V4's prefills by themselves. dd2294f; no command
// recorded.
inline constexpr int32_t kV4RoutedHeads = 32;

}  // namespace route

// ---- absorb (src/absorb/absorb_sm90.cu, stream_sm90.cu) -----------------------------------------
namespace absorb {

// Rows x heads from which streaming rows past weights that stay is faster than tiles: absorb_query
// of 512 tokens, 16 heads takes 11.3 us streamed and 9.3 in tiles, of 384 tokens, 32 heads 12.0 and
// 13.4. 17b2eb1, `winnow bench absorb --device cuda --cache cold` and these shapes beside it.
inline constexpr int64_t kStreamRowsTimesHeads = 10240;
// Rows up to which several products in one launch are faster than each in its own: 128 latents of
// 16 heads take 8.5 us instead of 20. 17b2eb1, the same command.
inline constexpr int64_t kOneLaunchRows = 128;
// A part of the multiprocessors' time: another number of shares must keep them busier by this much
// to be worth reading the weights once more. 3038f8f; no command recorded.
inline constexpr double kWorthMoreShares = 0.03;

}  // namespace absorb

// ---- score (src/score/score_sm90.cu) ------------------------------------------------------------
namespace score {

// Logits alive at a time in score_select: 256 MB. 48 MB would stay in the L2, but leave select with
// few rows a wave: 256 rows of 128k keep two of its blocks busy on every multiprocessor. 4,096
// tokens of 64k keys take 4,562 and 4,729 us with 128 MB, which are nine waves of two launches,
// 4,528 and 4,603 with 256 MB, five waves, and 4,515 and 4,491 with 512 MB. c20f553, ten calls by
// Python with workspaces of these sizes, twice in turns.
inline constexpr int64_t kWaveLogits = int64_t{64} << 20;
// Tokens of a request from which it counts as prefill: the product takes longer than the keys.
// 52cec42; no command recorded.
inline constexpr int64_t kPrefillTokens = 8;
// Tiles of 64 keys that the start of a block is worth: where a second block of the multiprocessor
// hides it, with decode, and with prefill, whose queries take longer to load. 52cec42; no command
// recorded.
inline constexpr int64_t kStartTilesHidden = 4;
inline constexpr int64_t kStartTilesDecode = 6;
inline constexpr int64_t kStartTilesPrefill = 8;
// A ratio, in twenty-fifths: decode takes shorter chunks while they cost at most this much, since
// lengths may differ. 52cec42; no command recorded.
inline constexpr int64_t kShorterChunksWorth25ths = 26;

}  // namespace score

// ---- mha (src/mha/dense_sm90.cu) ----------------------------------------------------------------
namespace mha {

// How many times as long the kernel by sets takes for a row that its 64 tokens want as the dense
// kernel for any row. 619adde, `winnow bench mha --device cuda --cache cold`.
inline constexpr int64_t kSetRowCost = 12;
// Tiles x heads from which clusters of eight heads gain more by reading ids once than they lose by
// filling 120 of the 132 multiprocessors. 619adde, the same command.
inline constexpr int64_t kTilesForClustersOfEight = 1024;

}  // namespace mha

// ---- select and score_select: top-k (src/cuda/topk.cu) ------------------------------------------
namespace topk {

// Bytes of shared memory of a block up to which two share a multiprocessor and leave 92 KB of cache
// to loads. c408062, `winnow bench select --device cuda --cache cold --kernel sm90`.
inline constexpr int64_t kSharedBytesOfTwo = 81 * 1024;
// Parts of a row: digits are as fast as a list where more than one in this many is wanted.
// c408062; no command recorded.
inline constexpr int64_t kListOneIn = 4;

}  // namespace topk

}  // namespace winnow::internal::core::tuning_h200
