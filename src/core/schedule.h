// The tile schedule: who attends to which columns of which token. Plans keep one per part of their
// batch; attend() makes one for a call without a plan.
#pragma once

#include <cstdint>
#include <span>

#include "core/namespaces.h"
#include "winnow/plan.h"

namespace winnow::internal::core {

inline constexpr int32_t kScheduleBlock =
    64;  // list positions: the unit of work, and of balanced cuts

struct ScheduleShape {
  int64_t tokens = 0;
  int32_t widths[2] = {0, 0};  // columns of the lists; their sum must fit int32
  int32_t ratio = 1;           // tokens per entry of the second list, for the estimate
  int32_t workers = 1;         // >= 1
  SplitPolicy split = SplitPolicy::kBalanced;
  int32_t split_size = 512;  // >= 1; of kFixed
};

// Tiles that a schedule of this shape has at most: balanced, every boundary between workers cuts at
// most one token; fixed, every token has ceil(width / split_size) tiles.
int64_t max_tiles(const ScheduleShape& shape) noexcept;

// Where the schedule goes: at least max_tiles(), workers + 1 and tokens + 1 entries.
struct ScheduleMemory {
  std::span<Tile> tiles;
  std::span<int32_t> worker_starts;
  std::span<int32_t> split_starts;
};

// Fills `memory` and returns views of the filled parts. The work of token t is estimated as
// min(width, ends[t]) of the first list and min(width, ends[t] / ratio) of the second (`ends`
// empty: the full widths), in blocks of 64; no work (padding) is free but has a tile. Only the
// balance rests on the estimate: a token's tiles cover its full width exactly once, in order.
// Balanced: no worker has more blocks than the mean + 1 + mean / 8. Allocates nothing.
Schedule make_schedule(const ScheduleShape& shape, std::span<const int32_t> ends,
                       const ScheduleMemory& memory) noexcept;

}  // namespace winnow::internal::core
