// One pass over the tokens lays the boundaries between workers at equal shares of the blocks.
#include "core/schedule.h"

#include <algorithm>

#include "core/arithmetic.h"

namespace winnow::internal::core {

namespace {

// Lays tiles side by side.
struct Tiler {
  std::span<Tile> tiles;
  int32_t step;  // longest tile
  int32_t count = 0, token = 0, begin = 0, split = 0;

  void add(int32_t end) {
    tiles[count++] = {token, begin, end, split++};
    begin = end;
  }
  void advance(int32_t to) {
    while (begin < to) add(begin + std::min(step, to - begin));
  }
};

}  // namespace

int64_t max_tiles(const ScheduleShape& s) noexcept {
  if (s.split == SplitPolicy::kBalanced) return s.tokens + s.workers - 1;
  const int64_t width = int64_t{s.widths[0]} + s.widths[1];
  return s.tokens * std::max<int64_t>(1, ceil_div(width, s.split_size));
}

Schedule make_schedule(const ScheduleShape& s, std::span<const int32_t> ends,
                       const ScheduleMemory& memory) noexcept {
  const int32_t width = s.widths[0] + s.widths[1];
  const auto blocks = [&](int64_t t) -> int64_t {
    if (ends.empty()) return ceil_div(int64_t{width}, kScheduleBlock);
    const int32_t end = std::max(ends[t], 0);
    return ceil_div(int64_t{std::min(s.widths[0], end)} + std::min(s.widths[1], end / s.ratio),
                    kScheduleBlock);
  };
  int64_t total = 0;
  for (int64_t t = 0; t < s.tokens; ++t) total += blocks(t);
  const bool idle = total == 0;  // nothing to read: share out the outputs to be zeroed
  if (idle) total = s.tokens;

  // A boundary this close to a token's edge moves there: a few percent of imbalance cost less than
  // a merge, and with many tokens per worker no token is cut at all.
  const int64_t slack = total / s.workers / 16;
  const auto boundary = [&](int32_t w) { return w * total / s.workers; };
  const bool fixed = s.split == SplitPolicy::kFixed;
  Tiler tiler{memory.tiles, fixed ? s.split_size : INT32_MAX};
  int32_t worker = 1;
  int64_t before = 0;  // blocks of the tokens so far
  memory.worker_starts[0] = 0;
  for (int64_t t = 0; t < s.tokens; ++t) {
    memory.split_starts[t] = tiler.count;
    tiler.token = static_cast<int32_t>(t);
    tiler.begin = 0;
    tiler.split = 0;
    const int64_t cost = idle ? 1 : blocks(t);
    for (; worker < s.workers; ++worker) {
      int64_t inside = boundary(worker) - before;
      if (inside <= slack && inside < cost) inside = 0;
      else if (cost - inside <= slack) break;  // the next token begins the next worker
      int64_t cut = inside * kScheduleBlock;
      // A fixed cut stays where it is; the boundary moves to the nearest.
      if (fixed) cut = (cut + s.split_size / 2) / s.split_size * s.split_size;
      tiler.advance(static_cast<int32_t>(std::min<int64_t>(cut, width)));
      memory.worker_starts[worker] = tiler.count;
    }
    tiler.advance(width);
    if (tiler.split == 0) tiler.add(width);  // lists without columns
    before += cost;
  }
  memory.split_starts[s.tokens] = tiler.count;
  for (; worker <= s.workers; ++worker) memory.worker_starts[worker] = tiler.count;
  return {memory.tiles.first(tiler.count), memory.worker_starts.first(s.workers + 1),
          memory.split_starts.first(s.tokens + 1)};
}

}  // namespace winnow::internal::core
