// Decode on Hopper: the cost models behind cut.h, in microseconds.
#include "attend/decode_sm90/cut.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/tuning_h200.h"

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

// The bf16 rows of V3.2 leave no room for Q of 64 heads beside a ring of eight stages.
int most_heads(const Shape& shape) { return format_of(shape) == CacheFormat::kV32Bf16 ? 48 : 64; }

// The cheapest cut by a model in microseconds: fixed cost, blocks of 64 rows, merge. A fixed split
// keeps to what depends on the token alone, so that a token's bits are the same in any batch.
// Clusters of many CTAs leave multiprocessors idle; splits that meet in `memory` bytes do not.
Cut cheapest_cut(const Shape& shape, size_t memory, const Gpu& gpu) {
  const int max_heads = most_heads(shape);
  const bool fixed = shape.fixed_split;
  const int blocks = blocks_of(shape);
  Cut best;
  for (int groups = ceil_div(shape.heads, max_heads); groups <= 16; ++groups) {
    const int heads = cta_heads_of(shape, ceil_div(shape.heads, groups));
    if (heads > max_heads || heads * (groups - 1) >= shape.heads) continue;
    for (int splits = 1; splits <= std::clamp(blocks, 1, 16); ++splits) {
      const int64_t clusters_needed = fixed ? 1 : shape.tokens * groups;
      const int room = gpu.clusters(gpu.device, splits);
      const int64_t waves = ceil_div(clusters_needed, room);
      const int share = ceil_div(blocks, splits);
      const double merge_us = splits > 1 ? tuned::kMergeUs + heads * tuned::kMergeUsPerHead : 0;
      const double cost = waves * (cta_us(shape, heads, share) + merge_us) +
                          tuned::kUsPerCta * clusters_needed * splits;
      if (cost < best.cost) best = {groups, splits, heads, false, cost};
      const int most = std::min(gpu.multiprocessors, kMostCtas);
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

// The most parts that a helper of the rests of `tokens` has: it takes tokens / helpers of them.
int most_parts(int tokens, int helpers) {
  const int more = tokens % helpers;
  return ceil_div(tokens, helpers) + (more > std::gcd(tokens, helpers) ? 1 : 0);
}

HelpedCut helped_cut(const Shape& shape, const Gpu& gpu) {
  HelpedCut best;
  const int groups = ceil_div(shape.heads, 64);
  const int token_blocks = blocks_of(shape);
  if (of_codes(shape) ||
      !takes_helpers(format_of(shape), cta_heads_for(ceil_div(shape.heads, groups))) ||
      shape.list_count > 1 || shape.fixed_split || shape.f32_out || shape.likely_width > 0 ||
      token_blocks < tuned::kHelpedBlocks || token_blocks > kMostHelpedBlocks)
    return best;
  // CTAs of each group of heads: an even number, so that two mains can be a cluster.
  const int ctas = std::min(gpu.multiprocessors, kMostCtas) / groups & ~1;
  if (shape.tokens >= ctas ||
      shape.workspace < helped_bytes(64, 2 * ctas * groups) + kExchangeAlign)
    return best;
  const int tokens = static_cast<int>(shape.tokens);
  // The blocks of each CTA if all had as many.
  const int share = ceil_div(tokens * token_blocks, ctas);
  for (int mains = 1; mains <= 2 && mains * tokens < ctas; ++mains) {
    const int helpers = ctas - mains * tokens;
    // Of a token's rest two helpers have something at most. Where most CTAs are mains, short lists
    // lose more than full ones gain.
    if (helpers < 2 || helpers > tokens || (mains == 1 && 3 * tokens >= 2 * ctas)) continue;
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
      // Every list would be left to its mains.
      if (least > token_blocks) continue;
      best = {groups, token_blocks, mains, blocks, helpers, std::max(least, 2), us};
    }
  }
  return best;
}

}  // namespace

CacheFormat format_of(const Shape& shape) {
  const CacheFormat first = shape.formats[0];
  if (shape.formats[1] == first) return first;
  const bool v32 = first == CacheFormat::kV32Fp8 || first == CacheFormat::kV32Bf16;
  return v32 ? CacheFormat::kV32Bf16 : CacheFormat::kV4Bf16;
}

HelpedTokens helped_tokens(const HelpedCut& cut, int tokens) {
  const auto reciprocal = [](int n) { return ceil_div(1u << 30, static_cast<uint32_t>(n)); };
  const int main_ctas = cut.mains * tokens;
  const int rest_blocks = cut.token_blocks - cut.mains * cut.main_blocks;
  return {.token_blocks = cut.token_blocks,
          .token_reciprocal = reciprocal(cut.token_blocks),
          .mains = cut.mains,
          .main_ctas = main_ctas,
          .main_blocks = cut.main_blocks,
          .rest_blocks = rest_blocks,
          .rest_reciprocal = reciprocal(rest_blocks),
          .helpers = cut.helpers,
          .helper_reciprocal = reciprocal(cut.helpers),
          .tokens_reciprocal = reciprocal(tokens),
          .least_helped = cut.least_helped,
          .first_stored = cut.mains == 1 ? main_ctas : 0};
}

Choice choose(const Shape& shape, size_t memory, const Gpu& gpu) {
  Choice choice{cheapest_cut(shape, memory, gpu), helped_cut(shape, gpu), false, 0};
  const double worth = choice.cut.splits > 1 ? tuned::kWorthHelpOfSplits : tuned::kWorthHelp;
  choice.is_helped = choice.helped.us < worth * choice.cut.cost;
  choice.cost = choice.is_helped ? choice.helped.us / tuned::kMeasuredOfModel : choice.cut.cost;
  return choice;
}

// The rest has a launch of its own: 68 tokens of 128 heads take 90 us so instead of 134.
int32_t first_launch(const Shape& shape, bool wide, const Gpu& gpu) {
  const auto tokens = static_cast<int32_t>(shape.tokens);
  const int most = wide ? 64 : most_heads(shape);
  const int groups = ceil_div(shape.heads, most);
  const int heads = cta_heads_of(shape, ceil_div(shape.heads, groups));
  const int at_once = gpu.multiprocessors / groups;
  const int32_t waves = tokens / at_once;
  const int32_t full = waves * at_once;
  if (full == 0 || full == tokens || shape.fixed_split) return tokens;
  const size_t memory = shape.workspace < kExchangeAlign ? 0 : shape.workspace - kExchangeAlign;
  const int blocks = blocks_of(shape);
  const double wave_us =
      wide ? tuned::kWideTokenUs + blocks * tuned::kWideBlockUs : cta_us(shape, heads, blocks);
  const Choice all = wide ? Choice{.cost = (waves + 1) * wave_us} : choose(shape, memory, gpu);
  const bool many = !wide && !all.is_helped && all.cut.splits == 1 &&
                    takes_many_tokens(format_of(shape), heads, shape.tables);
  const double launch_us = wide ? tuned::kLaunchUsAfterWide : tuned::kLaunchUsAfterDecode;
  // What the remaining tokens cost in the same launch, and in one of their own.
  const double more_us = all.cost - waves * wave_us - (many ? tuned::kNextTokenEarlierUs : 0);
  Shape rest = shape;
  rest.tokens = tokens - full;
  const double apart_us = launch_us + choose(rest, memory, gpu).cost;
  return apart_us < tuned::kWorthSecondLaunch * more_us ? full : tokens;
}

size_t workspace_bytes(const Shape& shape) {
  const int heads = std::max(8, cta_heads_for(std::min(shape.heads, 64)));
  return kMostCtas / 2 * exchange_bytes(heads, 2) + kExchangeAlign;
}

}  // namespace winnow::internal::attend::decode_sm90
