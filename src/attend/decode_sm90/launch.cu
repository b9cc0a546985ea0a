// Decode on Hopper: how a call is cut into CTAs, and the choice of the instantiation.
#include "attend/decode_sm90/launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace winnow::internal::attend::decode_sm90 {
namespace {

namespace tuned = tuning_h200::decode;

// Heads of a CTA: the instantiated sizes, each a multiple of 8.
constexpr int kCtaHeads[] = {8, 16, 24, 32, 48, 64};

int cta_heads_for(int heads) {
  for (int n : kCtaHeads)
    if (n >= heads) return n;
  return 0;
}

// Clusters of `size` CTAs that device `index` runs at once, asked once. A GPC has 14 to 18
// multiprocessors, so on an H200 {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7}.
int clusters(int index, int size) {
  static std::array<std::array<std::atomic<int>, 17>, 64> known{};
  std::atomic<int>& count = known[static_cast<unsigned>(index) % known.size()][size];
  if (count.load(std::memory_order_relaxed) == 0)
    count.store(size == 1 ? cuda::multiprocessors(index) : std::max(1, clusters_at_once(size)),
                std::memory_order_relaxed);
  return count.load(std::memory_order_relaxed);
}

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

// A call whose splits meet in the workspace has at most one CTA a multiprocessor: 144 on the
// largest Hopper.
constexpr int kMostCtas = 144;
constexpr size_t kExchangeAlign = 128;
// Products of e4m3 are added with some 13 bits below the largest term: the more of them a list has,
// the more is lost.
constexpr int32_t kMostCodeColumns = 4096;

// Codes multiplied as they are stored: CTAs of 64 heads alone.
bool of_codes(const Shape& shape) { return shape.precision == Precision::kFp8; }
// Heads of a CTA that has `heads` of them.
int cta_heads_of(const Shape& shape, int heads) {
  return of_codes(shape) ? 64 : cta_heads_for(heads);
}

// Blocks of 64 rows of a token.
int blocks_of(const Shape& shape) {
  return ceil_div(shape.likely_width > 0 ? shape.likely_width : shape.width, 64);
}
// What a block takes a CTA, and what a CTA of one split takes without merging, in microseconds.
double block_us(const Shape& shape, int cta_heads) {
  if (of_codes(shape)) return tuned::kBlockUsOfCodes;
  return cta_heads <= 32 ? tuned::kBlockUsFewHeads : tuned::kBlockUs;
}
double cta_us(const Shape& shape, int cta_heads, int blocks) {
  return tuned::kCtaUs + cta_heads * tuned::kCtaUsPerHead + blocks * block_us(shape, cta_heads);
}

// The kernel's rows. Two lists of different formats go to the bf16 kernel, which makes bf16 rows of
// fp8 records.
CacheFormat format_of(const Shape& shape) {
  const CacheFormat first = shape.formats[0];
  if (shape.formats[1] == first) return first;
  const bool v32 = first == CacheFormat::kV32Fp8 || first == CacheFormat::kV32Bf16;
  return v32 ? CacheFormat::kV32Bf16 : CacheFormat::kV4Bf16;
}

// The bf16 rows of V3.2 leave no room for Q of 64 heads beside a ring of eight stages.
int most_heads(const Shape& shape) { return format_of(shape) == CacheFormat::kV32Bf16 ? 48 : 64; }

// The cheapest cut by a model in microseconds: fixed cost, blocks of 64 rows, merge. A fixed split
// keeps to what depends on the token alone, so that a token's bits are the same in any batch.
// Clusters of many CTAs leave multiprocessors idle; splits that meet in `memory` bytes do not.
Cut cheapest_cut(const Shape& shape, size_t memory) {
  const int max_heads = most_heads(shape);
  const bool fixed = shape.fixed_split;
  const int blocks = blocks_of(shape);
  Cut best;
  for (int groups = ceil_div(shape.heads, max_heads); groups <= 16; ++groups) {
    const int heads = cta_heads_of(shape, ceil_div(shape.heads, groups));
    if (heads > max_heads || heads * (groups - 1) >= shape.heads) continue;
    for (int splits = 1; splits <= std::clamp(blocks, 1, 16); ++splits) {
      const int64_t clusters_needed = fixed ? 1 : shape.tokens * groups;
      const int room = clusters(shape.device, splits);
      const int64_t waves = ceil_div(clusters_needed, room);
      const int share = ceil_div(blocks, splits);
      const double merge_us = splits > 1 ? tuned::kMergeUs + heads * tuned::kMergeUsPerHead : 0;
      const double cost = waves * (cta_us(shape, heads, share) + merge_us) +
                          tuned::kUsPerCta * clusters_needed * splits;
      if (cost < best.cost) best = {groups, splits, heads, false, cost};
      const int most = std::min(cuda::multiprocessors(shape.device), kMostCtas);
      if (fixed || splits == 1 || clusters_needed * splits > most ||
          clusters_needed * exchange_bytes(heads, splits) > memory)
        continue;
      const double exchange_us = heads == 64 ? tuned::kExchangeUs64Heads : tuned::kExchangeUs;
      const double exchange_cost = tuned::kCtaUs + std::max(heads, 16) * tuned::kCtaUsPerHead +
                                   share * block_us(shape, heads) + exchange_us;
      if (exchange_cost < best.cost) best = {groups, splits, heads, true, exchange_cost};
    }
    if (fixed) break;
  }
  return best;
}

// Where splits may meet in the workspace, and how many bytes there are.
std::pair<std::byte*, size_t> exchange_memory(const Params& params) {
  void* begin = params.workspace.data();
  size_t bytes = params.workspace.size();
  if (!std::align(kExchangeAlign, 1, begin, bytes)) return {nullptr, 0};
  return {static_cast<std::byte*>(begin), bytes};
}

WideOutput wide_output_of(const Params& p) {
  if (p.block_heads == 0) return {p.out_f32, 0, 0, 0};
  return {p.out_f32, p.out_block_stride - p.block_heads * p.out_head_stride,
          p.lse_block_stride - p.block_heads * p.lse_head_stride,
          ceil_div(0x10000u, static_cast<uint32_t>(p.block_heads))};
}

// Launches the decode kernel for a call that is cut so.
void launch_cut(const Params& params, const Cut& cut) {
  const Shape shape = shape_of(params);
  const CacheFormat format = format_of(shape);
  const auto splits = static_cast<unsigned>(cut.splits);
  std::byte* const exchange = cut.exchange ? exchange_memory(params).first : nullptr;
  const Args args{{cut.splits, ceil_div(0x80000000u, splits), exchange},
                  device_params_of(params, cut.groups),
                  wide_output_of(params),
                  {}};
  // Without splits, each multiprocessor has a CTA that goes from token to token. Rows are counted
  // in stages of 16 over all tokens, in an int. Where a token's heads are in groups, these drift
  // apart over many rows, until one no longer finds the other's rows in the L2.
  Share share{cut.heads, params.tokens};
  if (cut.splits == 1 && takes_many_tokens(format, cut.heads, shape.tables) && !params.out_f32) {
    const int at_once = std::max(1, clusters(params.device.index, 1) / cut.groups);
    const int64_t rows = (int64_t{shape.width} + 64) * (params.tokens / at_once + 1);
    const int64_t most_rows = cut.groups == 1 ? int64_t{INT_MAX} : tuned::kMostRowsOfGroups;
    if (rows <= most_rows) share.tokens = at_once;
  }
  const cudaStream_t stream = cuda::stream_of(params.device);
  if (of_codes(shape)) return launch_v32_codes(args, share, stream);
  switch (format) {
    case CacheFormat::kV32Fp8: launch_v32_fp8(args, share, stream); break;
    case CacheFormat::kV32Bf16: launch_v32_bf16(args, share, stream); break;
    case CacheFormat::kV4Fp8: launch_v4_fp8(args, share, stream); break;
    default: launch_v4_bf16(args, share, stream); break;
  }
}

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

// The most parts that a helper of the rests of `tokens` has: it takes tokens / helpers of them.
int most_parts(int tokens, int helpers) {
  const int more = tokens % helpers;
  return ceil_div(tokens, helpers) + (more > std::gcd(tokens, helpers) ? 1 : 0);
}

HelpedCut helped_cut(const Shape& shape) {
  HelpedCut best;
  const int groups = ceil_div(shape.heads, 64);
  const int token_blocks = blocks_of(shape);
  if (of_codes(shape) ||
      !takes_helpers(format_of(shape), cta_heads_for(ceil_div(shape.heads, groups))) ||
      shape.list_count > 1 || shape.fixed_split || shape.f32_out || shape.likely_width > 0 ||
      token_blocks < tuned::kHelpedBlocks || token_blocks > kMostHelpedBlocks)
    return best;
  const int ranges = std::min(cuda::multiprocessors(shape.device), kMostCtas) / groups & ~1;
  if (shape.tokens >= ranges ||
      shape.workspace < helped_bytes(64, 2 * ranges * groups) + kExchangeAlign)
    return best;
  const int tokens = static_cast<int>(shape.tokens);
  // The blocks of each CTA if all had as many.
  const int share = ceil_div(tokens * token_blocks, ranges);
  for (int mains = 1; mains <= 2 && mains * tokens < ranges; ++mains) {
    const int helpers = ranges - mains * tokens;
    // Of a token's rest two helpers have something at most. Where most CTAs are mains, short lists
    // lose more than full ones gain.
    if (helpers < 2 || helpers > tokens || (mains == 1 && 3 * tokens >= 2 * ranges)) continue;
    const int parts = most_parts(tokens, helpers);
    if (parts > kMostHelperParts) continue;
    for (int blocks = share; blocks < share + 4 && mains * blocks < token_blocks; ++blocks) {
      const int help = ceil_div(tokens * (token_blocks - mains * blocks), helpers);
      const double hand_over_us = tuned::kHandOverUs + (parts - 1) * tuned::kNextPartUs;
      const double us =
          (groups == 1 ? tuned::kHelpedUsOneGroup : tuned::kHelpedUs) +
          (mains == 2 ? tuned::kTwoMainsUs : 0) +
          std::max(blocks * tuned::kHelpedBlockUs, help * tuned::kHelpedBlockUs + hand_over_us);
      if (us >= best.us) continue;
      // What a block of a list costs less in a helper than in a main that has the list alone.
      const double gain_us =
          (1.0 / mains - static_cast<double>(help) / token_blocks) * tuned::kHelpedBlockUs;
      const double help_us = hand_over_us + tuned::kAddPartsUs;
      const int least = gain_us > 0 ? static_cast<int>(std::ceil(help_us / gain_us)) : 2;
      best = {groups, token_blocks, mains, blocks, helpers, std::max(least, 2), us};
    }
  }
  return best;
}

// Sets the flags of all parts to 0, while the kernel that uses them begins.
__global__ void __launch_bounds__(kMostParts) clear_flags(uint32_t* flags) {
  let_next_start();
  flags[threadIdx.x] = 0;
}

void clear_flags_of(const Params& params) {
  clear_flags<<<1, kMostParts, 0, cuda::stream_of(params.device)>>>(
      reinterpret_cast<uint32_t*>(exchange_memory(params).first));
  keep_error(cudaGetLastError());
}

// Behind clear_flags_of(), and beside the kernel before it on the stream.
void launch_helped(const Params& params, const HelpedCut& cut) {
  std::byte* const parts = exchange_memory(params).first;
  const auto reciprocal = [](int n) { return ceil_div(1u << 30, static_cast<uint32_t>(n)); };
  const int main_ctas = cut.mains * params.tokens;
  const int rest_blocks = cut.token_blocks - cut.mains * cut.main_blocks;
  const Args args{{1, 0x80000000u, parts},
                  device_params_of(params, cut.groups),
                  wide_output_of(params),
                  {.token_blocks = cut.token_blocks,
                   .token_reciprocal = reciprocal(cut.token_blocks),
                   .mains = cut.mains,
                   .main_ctas = main_ctas,
                   .main_blocks = cut.main_blocks,
                   .rest_blocks = rest_blocks,
                   .rest_reciprocal = reciprocal(rest_blocks),
                   .helpers = cut.helpers,
                   .helper_reciprocal = reciprocal(cut.helpers),
                   .tokens_reciprocal = reciprocal(params.tokens),
                   .least_helped = cut.least_helped,
                   .first_stored = cut.mains == 1 ? main_ctas : 0}};
  launch_v32_fp8(args, {64, main_ctas + cut.helpers}, cuda::stream_of(params.device));
}

// Which way a launch takes, and what it costs by the model of cheapest_cut(), which counts more
// than is measured.
struct Choice {
  Cut cut;
  HelpedCut helped;
  bool is_helped = false;
  double cost = 0;
};
Choice choose(const Shape& shape, size_t memory) {
  Choice choice{cheapest_cut(shape, memory), helped_cut(shape), false, 0};
  const double worth = choice.cut.splits > 1 ? tuned::kWorthHelpOfSplits : tuned::kWorthHelp;
  choice.is_helped = choice.helped.us < worth * choice.cut.cost;
  choice.cost = choice.is_helped ? choice.helped.us / tuned::kMeasuredOfModel : choice.cut.cost;
  return choice;
}

Choice choose(const Params& params) {
  return choose(shape_of(params), exchange_memory(params).second);
}

}  // namespace

// The rest has a launch of its own: 68 tokens of 128 heads take 90 us so instead of 134.
int32_t first_launch(const Shape& shape, bool wide) {
  const auto tokens = static_cast<int32_t>(shape.tokens);
  const int most = wide ? 64 : most_heads(shape);
  const int groups = ceil_div(shape.heads, most);
  const int heads = cta_heads_of(shape, ceil_div(shape.heads, groups));
  const int at_once = cuda::multiprocessors(shape.device) / groups;
  const int32_t waves = tokens / at_once;
  const int32_t full = waves * at_once;
  if (full == 0 || full == tokens || shape.fixed_split) return tokens;
  const size_t memory = shape.workspace < kExchangeAlign ? 0 : shape.workspace - kExchangeAlign;
  const int blocks = blocks_of(shape);
  const double wave_us =
      wide ? tuned::kWideTokenUs + blocks * tuned::kWideBlockUs : cta_us(shape, heads, blocks);
  const Choice all = wide ? Choice{.cost = (waves + 1) * wave_us} : choose(shape, memory);
  const bool many = !wide && !all.is_helped && all.cut.splits == 1 &&
                    takes_many_tokens(format_of(shape), heads, shape.tables);
  const double launch_us = wide ? tuned::kLaunchUsAfterWide : tuned::kLaunchUsAfterDecode;
  // What the remaining tokens cost in the same launch, and in one of their own.
  const double more_us = all.cost - waves * wave_us - (many ? tuned::kNextTokenEarlierUs : 0);
  Shape rest = shape;
  rest.tokens = tokens - full;
  const double apart_us = launch_us + choose(rest, memory).cost;
  return apart_us < tuned::kWorthSecondLaunch * more_us ? full : tokens;
}

void run(const Params& params) noexcept {
  if (params.tokens == 0) return;
  const int32_t first = first_launch(shape_of(params), false);
  const Params begin = tokens_of(params, 0, first);
  const Params rest = tokens_of(params, first, params.tokens - first);
  const Choice of_begin = choose(begin);
  const Choice of_rest = rest.tokens > 0 ? choose(rest) : Choice{};
  // Flags are cleared before both launches, since the second one begins beside the first.
  if (of_begin.is_helped || of_rest.is_helped) clear_flags_of(params);
  if (of_begin.is_helped) launch_helped(begin, of_begin.helped);
  else launch_cut(begin, of_begin.cut);
  if (of_rest.is_helped) launch_helped(rest, of_rest.helped);
  else if (rest.tokens > 0) launch_cut(rest, of_rest.cut);
}

const char* fits(const Shape& shape) { return shape.heads > 128 ? "more than 128 heads" : nullptr; }

const char* fits_fp8(const Shape& shape) {
  if (!of_codes(shape)) return "Precision::kFp8 alone";
  for (const CacheFormat format : shape.formats)
    if (format != CacheFormat::kV32Fp8) return "V3.2's fp8 records alone";
  if (shape.width > kMostCodeColumns) return "more than 4,096 columns";
  return fits(shape);
}

// For any number of tokens up to the shape's: sums of all CTAs, and what is there once for two or
// more of them.
size_t workspace(const Shape& shape, int64_t) {
  const int heads = std::max(8, cta_heads_for(std::min(shape.heads, 64)));
  return kMostCtas / 2 * exchange_bytes(heads, 2) + kExchangeAlign;
}

}  // namespace winnow::internal::attend::decode_sm90

namespace winnow::internal::attend::wide_then_decode_sm90 {

void run(const Params& params) noexcept {
  if (params.tokens == 0) return;
  const int32_t first = decode_sm90::first_launch(shape_of(params), true);
  wide_sm90::run(tokens_of(params, 0, first));
  if (first < params.tokens) decode_sm90::run(tokens_of(params, first, params.tokens - first));
}

const char* fits(const Shape& shape) {
  if (const char* why = wide_sm90::fits(shape)) return why;
  if (decode_sm90::first_launch(shape, true) == shape.tokens)
    return "no tokens behind the last full wave that gain by a launch of their own";
  return nullptr;
}

}  // namespace winnow::internal::attend::wide_then_decode_sm90
