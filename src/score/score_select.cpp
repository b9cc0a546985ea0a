// score_select on the CPU: waves of tokens. A wave's logits fit in the workspace (8 MB at most
// unless one row needs more), are computed by the kernel over all workers and then selected from,
// so memory does not grow with the number of tokens, and the ids are those of score() and select().
#include <algorithm>

#include "core/arena.h"
#include "cpu/threads.h"
#include "cpu/topk.h"
#include "cpu/topk_blocks.h"
#include "score/kernel.h"

namespace winnow::internal::score {

namespace {

constexpr int64_t kWaveLogits = int64_t{1} << 21;

size_t bytes_of(int64_t logits) {
  Arena arena;
  arena.take<float>(static_cast<size_t>(logits));
  return arena.bytes();
}

}  // namespace

size_t smallest_workspace(int64_t keys) { return bytes_of(keys); }

int64_t longest_range(const Params& p) {
  int64_t longest = 1;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const Range r = p.ranges.of(t);
    longest = std::max(longest, r.last - r.first);
  }
  return longest;
}

size_t waves_workspace(const Shape& s) {
  const int64_t keys = std::max<int64_t>(s.keys, 1);
  const int64_t rows = std::clamp<int64_t>(kWaveLogits / keys, 1, std::max<int64_t>(s.tokens, 1));
  return bytes_of(rows * keys);
}

void in_waves(const ScoreKernel& kernel, const SelectParams& p) noexcept {
  // Rows as long as the longest range: many tokens share a wave when contexts are short.
  const int64_t longest = longest_range(p.score);
  const int64_t room = static_cast<int64_t>(
      (p.workspace.size() - std::min(p.workspace.size(), Arena::kAlign)) / sizeof(float));
  float* logits = Arena(p.workspace).take<float>(static_cast<size_t>(room));
  const int64_t rows = std::max<int64_t>(1, std::min(room, kWaveLogits) / longest);

  for (int64_t first = 0; first < p.score.tokens; first += rows) {
    Params wave = wave_of(p.score, first, std::min(rows, p.score.tokens - first));
    wave.logits = logits;
    wave.logit_stride = longest;
    wave.clean = false;
    wave.from_start = true;
    kernel.run(wave);

    const bool split = wave.tokens < cpu::threads();
    const auto select_row = [&](int64_t t) {
      const core::Range range = wave.ranges.of(t);
      const auto start = static_cast<int32_t>(range.first);
      const cpu::TopkRow row{logits + t * longest, range.last - start, p.relative ? 0 : start};
      const std::span<int32_t> ids(p.ids + (first + t) * p.id_stride, static_cast<size_t>(p.width));
      if (p.blocks.restricts)
        cpu::topk_within(p.blocks, p.blocks.within_of(first + t), row.values, range,
                         p.relative ? start : 0, ids);
      else cpu::topk(row, ids, split);
      if (p.blocks.finds)
        cpu::best_blocks(p.blocks, row.values, range, p.blocks.best_of(first + t));
      if (p.values) cpu::take_values(row, ids, p.values + (first + t) * p.value_stride);
    };
    if (split && !p.blocks.given())
      for (int64_t t = 0; t < wave.tokens; ++t) select_row(t);
    else cpu::parallel_for(wave.tokens, [&](int64_t t, int) { select_row(t); });
  }
}

}  // namespace winnow::internal::score
