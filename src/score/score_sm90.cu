// score and score_select on Hopper: how many tokens share a pass, how long a block's stretch of
// keys is, and how many rows of logits are alive at a time.
#include <algorithm>
#include <bit>

#include "core/arena.h"
#include "cuda/device.h"
#include "cuda/topk.h"
#include "score/score_sm90.cuh"

namespace winnow::scoring {

namespace {

// Logits alive at a time in score_select: 48 MB, most of which stay in the 60 MB of L2 between the
// two kernels.
constexpr int64_t kWaveLogits = int64_t{12} << 20;

// Tokens that follow each other in one request, at a guess: the rows of the block table are the
// requests.
int64_t tokens_per_request(const Params& p) {
  if (!p.requests) return p.tokens;
  return p.table_rows > 0 ? p.tokens / p.table_rows : 1;
}

// Keys per block: equal chunks. A block costs its tiles and a start worth about four (decode; the
// queries of prefill take longer to load), and blocks run in rounds of as many as fit at once: the
// chunks that come nearest to the least sum, and with decode, where lengths may differ, the
// shortest within 4 % of it.
template <class C>
int32_t chunk_for(const Params& p) {
  const int64_t groups = (p.tokens + C::kTokens - 1) / C::kTokens;
  const int64_t tiles = (p.ranges.limit + kTileKeys - 1) / kTileKeys;
  const int64_t slots = int64_t{gpu::multiprocessors(p.device.index)} * C::kBlocks;
  const int64_t start = C::kRounds > 1 ? 8 : 4;
  const auto cost = [&](int64_t tiles_each) {
    const int64_t chunks = (tiles + tiles_each - 1) / tiles_each;
    return (groups * chunks + slots - 1) / slots * (tiles_each + start);
  };
  // Tried: the lengths that make the blocks fill 1 to 8 rounds.
  int64_t best = tiles;
  for (int64_t round = 1; round <= 8; ++round) {
    const int64_t chunks = std::clamp<int64_t>(round * slots / groups, 1, tiles);
    const int64_t each = (tiles + chunks - 1) / chunks;
    const int64_t limit = C::kRounds > 1 ? cost(best) - 1 : cost(best) * 26 / 25;
    if (cost(each) <= limit) best = each;
  }
  return static_cast<int32_t>(best * kTileKeys);
}

template <int Heads, int Group, int Rounds>
void launch(const Params& p) noexcept {
  using C = Config<Heads, Group, Rounds>;
  launch<C>(p, chunk_for<C>(p));
}

// Whether whole tiles can be brought in by bulk copies: each inside a page, on 16-byte addresses.
bool copyable(const Params& p) {
  if (!p.requests)
    return p.row_stride == kDim && p.scale_stride == 1 &&
           (reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.scales)) % 16 == 0;
  return p.page % kTileKeys == 0 &&
         (reinterpret_cast<uintptr_t>(p.cache) | static_cast<uintptr_t>(p.page_stride)) % 16 == 0;
}

Guess guess_of(const Params& p, int64_t together) {
  const auto log2 = [](int64_t x) {
    const auto bits = static_cast<uint64_t>(x);
    return std::has_single_bit(bits) ? std::countr_zero(bits) : -1;
  };
  Guess g{-1, 0, copyable(p)};
  if (!p.requests || log2(together) < 0 || log2(p.page) < 0) return g;
  g.request_shift = static_cast<int8_t>(log2(together));
  g.page_shift = static_cast<int8_t>(log2(p.page));
  return g;
}

}  // namespace

void score_sm90(const Params& call) noexcept {
  if (call.tokens == 0 || call.ranges.limit == 0) return;
  const int64_t together = tokens_per_request(call);
  Params p = call;
  p.guess = guess_of(p, std::max<int64_t>(together, 1));
  if (together >= 8) {
    if (p.heads <= 16) return launch<16, 8, 3>(p);
    if (p.heads <= 32) return launch<32, 4, 3>(p);
    if (p.heads <= 64) return launch<64, 4, 2>(p);
    return launch<128, 2, 2>(p);
  }
  if (p.heads > 64) return together >= 2 ? launch<128, 2, 1>(p) : launch<128, 1, 1>(p);
  together >= 2 ? launch<64, 2, 1>(p) : launch<64, 1, 1>(p);
}

namespace {

// Floats from one row of a wave to the next: rows start on 16-byte boundaries.
int64_t row_of(int64_t keys) { return std::max<int64_t>((keys + 3) / 4 * 4, 4); }

}  // namespace

size_t sm90_workspace(const Shape& s) {
  const int64_t row = row_of(s.keys);
  const int64_t rows = std::clamp<int64_t>(kWaveLogits / row, 1, std::max<int64_t>(s.tokens, 1));
  Arena arena;
  arena.take<float>(static_cast<size_t>(rows * row));
  return arena.bytes();
}

void select_sm90(const ScoreKernel& kernel, const SelectParams& p) noexcept {
  const int64_t row = row_of(p.score.ranges.limit);
  const int64_t room = static_cast<int64_t>((p.workspace.size() - Arena::kAlign) / sizeof(float));
  float* logits = Arena(p.workspace).take<float>(static_cast<size_t>(room));
  const int64_t rows = std::max<int64_t>(1, std::min(room, kWaveLogits) / row);
  for (int64_t first = 0; first < p.score.tokens; first += rows) {
    Params wave = wave_of(p.score, first, std::min(rows, p.score.tokens - first));
    wave.logits = logits, wave.logit_stride = row;
    wave.clean = false, wave.from_start = true;
    wave.overlap = first > 0;  // with the selection of the wave before
    kernel.run(wave);
    gpu::topk({.logits = logits,
               .logit_stride = row,
               .tokens = wave.tokens,
               .ranges = wave.ranges,
               .from_start = true,
               .ids = p.ids + first * p.id_stride,
               .id_stride = p.id_stride,
               .width = p.width,
               .relative = p.relative,
               .overlap = wave.ranges.limit > 0,
               .device = p.score.device});
  }
}

}  // namespace winnow::scoring
