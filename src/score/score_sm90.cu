// score and score_select on Hopper: how many tokens share a pass, how long a block's stretch of
// keys is, and how many rows of logits are alive at a time.
#include <algorithm>

#include "core/arena.h"
#include "cuda/device.h"
#include "cuda/topk.h"
#include "score/score_sm90.cuh"

namespace winnow::scoring {

namespace {

// Logits alive at a time in score_select: 48 MB, most of which stay in the 60 MB of L2 between the
// two kernels.
constexpr int64_t kWaveLogits = int64_t{12} << 20;

// Keys per block: equal chunks, about four blocks per multiprocessor where there is so much work.
int32_t chunk_for(const Params& p, int tokens) {
  const int64_t groups = (p.tokens + tokens - 1) / tokens, limit = p.ranges.limit;
  const int64_t blocks = 4 * gpu::multiprocessors(p.device.index);
  const int64_t most = std::max<int64_t>(1, limit / 256);
  const int64_t chunks = std::clamp<int64_t>((blocks + groups - 1) / groups, 1, most);
  const int64_t even = (limit + chunks - 1) / chunks;
  return static_cast<int32_t>((even + kTileKeys - 1) / kTileKeys * kTileKeys);
}

template <int Heads, int Group, int Rounds>
void launch(const Params& p) noexcept {
  using C = Config<Heads, Group, Rounds>;
  launch<C>(p, chunk_for(p, C::kTokens));
}

// Tokens that follow each other in one request, at a guess: the rows of the block table are the
// requests.
int64_t tokens_per_request(const Params& p) {
  if (!p.requests) return p.tokens;
  return p.table_rows > 0 ? p.tokens / p.table_rows : 1;
}

}  // namespace

void score_sm90(const Params& p) noexcept {
  if (p.tokens == 0 || p.ranges.limit == 0) return;
  const int64_t together = tokens_per_request(p);
  if (together >= 8) {
    if (p.heads <= 16) return launch<16, 16, 2>(p);
    if (p.heads <= 32) return launch<32, 8, 2>(p);
    if (p.heads <= 64) return launch<64, 4, 2>(p);
    return launch<128, 2, 2>(p);
  }
  if (p.heads > 64) return together >= 2 ? launch<128, 2, 1>(p) : launch<128, 1, 1>(p);
  together >= 2 ? launch<64, 2, 1>(p) : launch<64, 1, 1>(p);
}

size_t sm90_workspace(const Shape& s) {
  const int64_t keys = std::max<int64_t>(s.keys, 1);
  const int64_t rows = std::clamp<int64_t>(kWaveLogits / keys, 1, std::max<int64_t>(s.tokens, 1));
  Arena arena;
  arena.take<float>(static_cast<size_t>(rows * keys));
  return arena.bytes();
}

void select_sm90(const ScoreKernel& kernel, const SelectParams& p) noexcept {
  const int64_t keys = std::max<int64_t>(p.score.ranges.limit, 1);
  const int64_t room = static_cast<int64_t>((p.workspace.size() - Arena::kAlign) / sizeof(float));
  float* logits = Arena(p.workspace).take<float>(static_cast<size_t>(room));
  const int64_t rows = std::max<int64_t>(1, std::min(room, kWaveLogits) / keys);
  for (int64_t first = 0; first < p.score.tokens; first += rows) {
    Params wave = wave_of(p.score, first, std::min(rows, p.score.tokens - first));
    wave.logits = logits, wave.logit_stride = keys;
    wave.clean = false, wave.from_start = true;
    kernel.run(wave);
    gpu::topk({.logits = logits,
               .logit_stride = keys,
               .tokens = wave.tokens,
               .ranges = wave.ranges,
               .from_start = true,
               .ids = p.ids + first * p.id_stride,
               .id_stride = p.id_stride,
               .width = p.width,
               .relative = p.relative,
               .device = p.score.device});
  }
}

}  // namespace winnow::scoring
