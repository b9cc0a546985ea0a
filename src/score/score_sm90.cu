// score and score_select on Hopper: how many tokens share a pass, how long a block's stretch of
// keys is, and how many rows of logits are alive at a time.
#include <algorithm>
#include <bit>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/tuning_h200.h"
#include "cuda/device.h"
#include "cuda/topk.h"
#include "cuda/topk_blocks.h"
#include "score/score_sm90.cuh"

namespace winnow::internal::score {

namespace {

namespace tuned = tuning_h200::score;

// Tokens that follow each other in one request, at a guess: the rows of the block table are the
// requests.
int64_t tokens_per_request(const Params& p) {
  if (p.guess.together > 0) return p.guess.together;
  const int64_t requests = p.requests ? std::max<int64_t>(p.table_rows, 1) : 1;
  return std::max<int64_t>(p.tokens / requests, 1);
}

// Keys per block: equal chunks. A block costs its tiles and a start worth some more (the queries of
// more tokens take longer to load), and blocks run in rounds of as many as fit at once: the chunks
// that come nearest to the least sum, and with decode, where lengths may differ, the shortest
// within 4 % of it. (Where a second block hides the starts, of the last one found.)
template <class C>
int32_t chunk_for(const Params& p) {
  const int64_t groups = ceil_div(p.tokens, p.guess.step);
  const int64_t tiles = ceil_div(p.ranges.limit, kTileKeys);
  const int64_t slots = int64_t{cuda::multiprocessors(p.device.index)} * C::kBlocks;
  const bool decode = p.guess.together < tuned::kPrefillTokens;
  const int64_t start = C::kBlocks == 2 ? tuned::kStartTilesHidden
                        : decode        ? tuned::kStartTilesDecode
                                        : tuned::kStartTilesPrefill;
  const auto cost = [&](int64_t tiles_each) {
    const int64_t chunks = ceil_div(tiles, tiles_each);
    return ceil_div(groups * chunks, slots) * (tiles_each + start);
  };
  // Tried: the lengths that make the blocks fill 1 to 8 rounds.
  int64_t best = tiles, least = cost(tiles);
  for (int64_t round = 1; round <= 8; ++round) {
    const int64_t chunks = std::clamp<int64_t>(round * slots / groups, 1, tiles);
    const int64_t each = ceil_div(tiles, chunks);
    const int64_t most = decode ? least * tuned::kShorterChunksWorth25ths / 25 : least - 1;
    if (cost(each) > most) continue;
    best = each;
    least = C::kBlocks == 2 ? cost(each) : std::min(least, cost(each));
  }
  return static_cast<int32_t>(best * kTileKeys);
}

// For blocks that hold `tokens`: few tokens of a request stay in one block.
Guess guess_of(const Params& p, int64_t together, int32_t tokens) {
  const auto log2 = [](int64_t x) {
    const auto bits = static_cast<uint64_t>(x);
    return static_cast<int8_t>(std::has_single_bit(bits) ? std::countr_zero(bits) : -1);
  };
  Guess g = p.guess;
  g.together = together;
  g.step = static_cast<int32_t>(
      together < tuned::kPrefillTokens ? std::min<int64_t>(together, tokens) : tokens);
  if (!p.requests || together % g.step != 0 || log2(p.page) < 0) return g;
  g.request_shift = log2(together / g.step);
  g.page_shift = log2(p.page);
  return g;
}

// Whether the start of a block outweighs its keys (at most 16 tiles a multiprocessor), so that it
// should have few queries to wait for.
bool few_keys(const Params& p) {
  const int64_t requests = p.tokens / tokens_per_request(p);
  return requests * p.ranges.limit <=
         int64_t{16} * kTileKeys * cuda::multiprocessors(p.device.index);
}

template <int Heads, int Group, int Rounds>
void launch(const Params& call, int64_t together) noexcept {
  using C = Config<Heads, Group, Rounds>;
  Params p = call;
  p.guess = guess_of(call, together, C::kTokens);
  launch<C>(p, chunk_for<C>(p));
}

}  // namespace

namespace {

// The tokens of a request share a pass over its keys: as few columns as hold them.
void score_all(const Params& p) noexcept {
  if (p.tokens == 0 || p.ranges.limit == 0) return;
  const int64_t n = tokens_per_request(p);
  if (n >= tuned::kPrefillTokens) {
    if (p.heads <= 16) return launch<16, 8, 3>(p, n);
    if (p.heads <= 32) return launch<32, 4, 3>(p, n);
    if (p.heads <= 64) return launch<64, 4, 2>(p, n);
    return launch<128, 2, 2>(p, n);
  }
  if (p.heads > 64) return n % 2 == 0 ? launch<128, 2, 1>(p, n) : launch<128, 1, 1>(p, n);
  if (n == 1) return launch<64, 1, 1>(p, n);
  if (n == 2) return p.heads <= 32 ? launch<32, 2, 1>(p, n) : launch<64, 2, 1>(p, n);
  if (n <= 4) {
    if (p.heads <= 16) return launch<16, 4, 1>(p, n);
    if (p.heads <= 32) return launch<32, 4, 1>(p, n);
    if (n == 3) return launch<64, 3, 1>(p, n);
    return few_keys(p) ? launch<64, 2, 1>(p, n) : launch<64, 4, 1>(p, n);
  }
  if (p.heads <= 16) return launch<16, 8, 1>(p, n);
  if (p.heads <= 32) return launch<32, 8, 1>(p, n);
  n < 7 ? launch<64, 3, 2>(p, n) : launch<64, 4, 2>(p, n);
}

}  // namespace

void bulk_sm90(const Params& p) noexcept {
  Params call = p;
  call.guess.bulk = true;
  score_all(call);
}

void loads_sm90(const Params& p) noexcept { score_all(p); }

namespace {

// Floats from one row of a wave to the next: rows start on 16-byte boundaries.
int64_t row_of(int64_t keys) { return std::max<int64_t>(round_up(keys, 4), 4); }

// Rows of a wave of at most `most`: equal waves, cut between requests where these are short.
int64_t wave_rows(int64_t tokens, int64_t most, int64_t together) {
  most = std::max<int64_t>(most, 1);
  const int64_t unit = std::min(together, tuned::kPrefillTokens), waves = ceil_div(tokens, most);
  const int64_t rows = round_up(ceil_div(tokens, waves), unit);
  return rows <= most ? rows : std::max(most / unit * unit, std::min(most, unit));
}

}  // namespace

size_t sm90_workspace(const Shape& s) {
  const int64_t row = row_of(s.keys);
  const int64_t rows =
      std::clamp<int64_t>(tuned::kWaveLogits / row, 1, std::max<int64_t>(s.tokens, 1));
  Arena arena;
  arena.take<float>(static_cast<size_t>(rows * row));
  return arena.bytes();
}

namespace {

// Those of the tokens from `first` on.
cuda::BlockParams blocks_of(const core::Blocks& b, int64_t first) {
  return {.size = b.size,
          .within = b.within + first * b.within_stride,
          .within_stride = b.within_stride,
          .within_count = b.within_count,
          .best = b.best + first * b.best_stride,
          .best_stride = b.best_stride,
          .best_count = b.best_count,
          .restricts = b.restricts,
          .finds = b.finds};
}

}  // namespace

void select_sm90(const ScoreKernel& kernel, const SelectParams& p) noexcept {
  if (p.score.tokens == 0) return;
  const int64_t row = row_of(p.score.ranges.limit);
  const int64_t room = static_cast<int64_t>((p.workspace.size() - Arena::kAlign) / sizeof(float));
  float* logits = Arena(p.workspace).take<float>(static_cast<size_t>(room));
  const int64_t together = tokens_per_request(p.score);
  const int64_t rows =
      wave_rows(p.score.tokens, std::min(room, tuned::kWaveLogits) / row, together);
  for (int64_t first = 0; first < p.score.tokens; first += rows) {
    Params wave = wave_of(p.score, first, std::min(rows, p.score.tokens - first));
    wave.logits = logits;
    wave.logit_stride = row;
    wave.clean = false;
    wave.from_start = true;
    wave.overlap = first > 0;  // with the selection of the wave before
    wave.guess.together = together;
    wave.guess.first_request = static_cast<int32_t>(first / together);
    kernel.run(wave);
    const cuda::TopkParams topk{.logits = logits,
                                .logit_stride = row,
                                .tokens = wave.tokens,
                                .ranges = wave.ranges,
                                .from_start = true,
                                .ids = p.ids + first * p.id_stride,
                                .id_stride = p.id_stride,
                                .width = p.width,
                                .values = p.values ? p.values + first * p.value_stride : nullptr,
                                .value_stride = p.value_stride,
                                .relative = p.relative,
                                .overlap = wave.ranges.limit > 0,
                                .device = p.score.device};
    if (p.blocks.given()) {
      cuda::topk_in_blocks(topk, blocks_of(p.blocks, first));
      detail::set_last_chosen(kernel.name, "sm90/blocks");
      continue;
    }
    const cuda::TopkForm form = cuda::fastest_topk(cuda::shape_of(topk));
    cuda::topk(topk, form);
    detail::set_last_chosen(kernel.name, cuda::name_of(form));
  }
}

}  // namespace winnow::internal::score
