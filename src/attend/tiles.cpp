// The driver: runs the schedule with any CPU kernel. Compiled for any machine; what is hot here
// (fold, finish) has vectors of its own in rows.cpp.
#include "attend/tiles.h"

#include <algorithm>
#include <utility>

#include "core/arena.h"
#include "cpu/threads.h"

namespace winnow::attention {

namespace {

// Partials that cut tokens leave in the workspace, at most. Each worker stores the tiles of the
// token that it continues and one part for the token that it leaves unfinished; balanced schedules
// cut at most once per boundary, fixed ones have the same number of tiles for every token.
int64_t max_parts(int64_t tokens, int64_t tiles, int64_t workers) {
  const int64_t per_token = tokens > 0 ? (tiles + tokens - 1) / tokens : 0;
  return std::min(tiles, workers * (per_token + 2));
}

// What a call of a schedule's size needs; `workers` is at least the threads of the pool.
struct Need {
  int64_t tiles, workers;
};

struct Memory {
  int32_t* slot_starts;  // [workers + 1]: first stored part of each worker
  int32_t* leavers;      // [workers]: those that leave a token unfinished
  Partial* stored;       // [parts][heads]
  std::byte* scratch;    // [threads][scratch_bytes]
  size_t scratch_bytes;  // two rows of parts, then the kernel's own

  Memory(Arena& arena, const Shape& shape, const Need& need, const TileKernel& kernel) {
    const size_t own = kernel.scratch(shape.heads) + 2 * sizeof(Partial) * shape.heads;
    scratch_bytes = (own + Arena::kAlign - 1) / Arena::kAlign * Arena::kAlign;
    slot_starts = arena.take<int32_t>(need.workers + 1);
    leavers = arena.take<int32_t>(need.workers);
    stored = arena.take<Partial>(max_parts(shape.tokens, need.tiles, need.workers) * shape.heads);
    scratch = arena.take<std::byte>(need.workers * scratch_bytes);
  }
};

class Run {
 public:
  Run(const Params& p, const TileKernel& kernel, const Memory& memory)
      : p_(p), kernel_(kernel), memory_(memory), workers_(p.schedule.worker_starts.size() - 1) {
    memory.slot_starts[0] = 0;
    for (int64_t w = 0; w < workers_; ++w) {
      memory.slot_starts[w + 1] = memory.slot_starts[w] + continued(w) + unfinished(w);
      if (unfinished(w)) memory.leavers[leavers_++] = static_cast<int32_t>(w);
    }
  }

  void operator()() {
    // Whole tokens of a worker go to whoever is free: cores of a shared machine differ in speed.
    host::parallel_for(workers_ * kPieces, [this](int64_t task, int thread) {
      work(task % workers_, static_cast<int>(task / workers_), thread);
    });
    // Second pass: a token belongs to the worker that began it; heads are shared out.
    const int64_t groups = (p_.heads + kGroup - 1) / kGroup;
    host::parallel_for(leavers_ * groups, [&](int64_t task, int) {
      merge(memory_.leavers[task / groups], static_cast<int32_t>(task % groups));
    });
  }

 private:
  static constexpr int kPieces = 4;     // of a worker's tiles, at the edges of tokens
  static constexpr int32_t kGroup = 2;  // heads of a merging task: 16 heads keep 8 cores busy

  int32_t first(int64_t w) const { return p_.schedule.worker_starts[w]; }
  int32_t token_begin(int32_t tile) const {
    return p_.schedule.split_starts[p_.schedule.tiles[tile].token];
  }
  int32_t token_end(int32_t tile) const {
    return p_.schedule.split_starts[p_.schedule.tiles[tile].token + 1];
  }
  // Leading tiles of worker w whose token another worker began.
  int32_t continued(int64_t w) const {
    const int32_t a = first(w), b = first(w + 1);
    return a < b && token_begin(a) < a ? std::min(b, token_end(a)) - a : 0;
  }
  // Whether worker w begins a token that others end.
  int32_t unfinished(int64_t w) const {
    const int32_t a = first(w), b = first(w + 1);
    return a < b && token_begin(b - 1) >= a && token_end(b - 1) > b;
  }
  // First tile of a worker's piece.
  int32_t piece_begin(int64_t w, int piece) const {
    const int32_t a = first(w), b = first(w + 1);
    const auto i = static_cast<int32_t>(a + (int64_t{b - a} * piece + kPieces - 1) / kPieces);
    return i < b && token_begin(i) < i && i > a ? std::min(b, token_end(i)) : i;
  }
  Partial* slot(int64_t index) const { return memory_.stored + index * p_.heads; }

  void work(int64_t w, int piece, int thread) const {
    std::byte* scratch = memory_.scratch + thread * memory_.scratch_bytes;
    Partial* const own = reinterpret_cast<Partial*>(scratch);
    Partial* const spare = own + p_.heads;
    scratch = reinterpret_cast<std::byte*>(spare + p_.heads);
    const int32_t a = first(w), b = first(w + 1);
    const int32_t begin = piece_begin(w, piece), end = piece_begin(w, piece + 1);
    for (int32_t i = begin; i < end; ++i) {
      const Tile& tile = p_.schedule.tiles[i];
      const bool mine = token_begin(i) >= a, whole = mine && token_end(i) <= b;
      Partial* const sum = whole ? own : slot(memory_.slot_starts[w + 1] - 1);
      const bool begins = i == token_begin(i);
      Partial* const target = !mine ? slot(memory_.slot_starts[w] + i - a) : begins ? sum : spare;
      const bool new_query = i == begin || tile.token != p_.schedule.tiles[i - 1].token;
      kernel_.tile(p_, {tile.token, tile.begin, tile.end, new_query, target}, scratch);
      if (mine && !begins)
        for (int32_t h = 0; h < p_.heads; ++h) fold(sum[h], spare[h]);
      if (whole && i + 1 == token_end(i))
        for (int32_t h = 0; h < p_.heads; ++h) finish(p_, tile.token, h, sum[h]);
    }
  }

  // Asks for heads of a part that another core has just written, two parts early: one line after
  // the other they take some 16 ns each.
  static void fetch(const Partial* part, int32_t heads) {
    const char* bytes = reinterpret_cast<const char*>(part);
    for (size_t i = 0; i < heads * sizeof(Partial); i += 64) __builtin_prefetch(bytes + i, 0, 2);
  }

  // Continues the fold of the token that worker w left unfinished with what the next ones stored.
  void merge(int64_t w, int32_t group) const {
    const int32_t last_tile = first(w + 1) - 1, end = token_end(last_tile);
    Partial* const sum = slot(memory_.slot_starts[w + 1] - 1);
    const int32_t h0 = group * kGroup, h1 = std::min(h0 + kGroup, p_.heads);
    const int64_t stored = memory_.slot_starts[workers_];
    for (int64_t next = w + 1; next < workers_ && first(next) < end; ++next)
      for (int32_t i = first(next); i < std::min(first(next + 1), end); ++i) {
        const int64_t at = memory_.slot_starts[next] + i - first(next);
        if (at + 2 < stored) fetch(slot(at + 2) + h0, h1 - h0);
        for (int32_t h = h0; h < h1; ++h) fold(sum[h], slot(at)[h]);
      }
    const int32_t token = p_.schedule.tiles[last_tile].token;
    for (int32_t h = h0; h < h1; ++h) finish(p_, token, h, sum[h]);
  }

  const Params& p_;
  const TileKernel& kernel_;
  const Memory& memory_;
  const int64_t workers_;
  int64_t leavers_ = 0;
};

}  // namespace

void run_tiles(const Params& p, const TileKernel& kernel) noexcept {
  if (p.tokens == 0) return;
  Arena arena(p.workspace);
  const Shape shape{.heads = p.heads, .tokens = p.tokens};
  const auto workers = static_cast<int64_t>(p.schedule.worker_starts.size()) - 1;
  const Need need{static_cast<int64_t>(p.schedule.tiles.size()),
                  std::max<int64_t>(workers, host::threads())};
  const Memory memory(arena, shape, need, kernel);
  Run(p, kernel, memory)();
}

size_t tile_workspace(const Shape& shape, int64_t tiles, const TileKernel& kernel) {
  Arena arena;
  Memory(arena, shape, {tiles, host::threads()}, kernel);
  return arena.bytes();
}

Cursor::Cursor(const Params& p, const TileJob& job) noexcept : p_(p) {
  int64_t base = 0;  // position of the list's first column
  for (int i = 0; i < p.list_count; ++i) {
    const ListView& list = p.lists[i];
    const int64_t begin = std::max<int64_t>(job.begin - base, 0);
    const int64_t end = std::min<int64_t>(job.end - base, columns(list, job.token));
    const int32_t* row = list.indices + job.token * list.index_stride;
    if (begin < end) range_[i] = {row + begin, row + end};
    base += list.width;
  }
  if (p.requests) request_ = p.requests[job.token * p.request_stride];
}

int32_t Cursor::fill(Rows& rows, int32_t limit) noexcept {
  rows.count = 0;
  for (int i = 0; i < 2; ++i) {
    Range& r = range_[i];
    while (r.index < r.end && rows.count < limit) {
      const Entry e = resolve(p_.lists[i], *r.index++, request_);
      rows.row[rows.count] = e;
      rows.count += e.page >= 0;
    }
    if (i == 0) rows.cut = rows.count;
  }
  return rows.count;
}

}  // namespace winnow::attention
