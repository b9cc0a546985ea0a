// The driver: runs the schedule with any CPU kernel. Compiled for any machine; what is hot here
// (fold, finish) has vectors of its own in rows.cpp.
#include "attend/cpu/tiles.h"

#include <algorithm>

#include "core/arena.h"
#include "core/arithmetic.h"
#include "cpu/threads.h"

namespace winnow::internal::attend::cpu {

namespace {

// Partials that cut tokens leave in the workspace, at most. Each worker stores the tiles of the
// token that it continues and one part for the token that it leaves unfinished; balanced schedules
// cut at most once per boundary, fixed ones have the same number of tiles for every token.
int64_t max_parts(int64_t tokens, int64_t tiles, int64_t workers) {
  const int64_t per_token = tokens > 0 ? ceil_div(tiles, tokens) : 0;
  return std::min(tiles, workers * (per_token + 2));
}

// What a call of a schedule's size needs; `workers` is at least the threads of the pool.
struct Need {
  int64_t tiles, workers;
};

struct Memory {
  int32_t* slot_starts;  // [workers + 1]: first stored part of each worker
  int32_t* leavers;      // [workers]: those that leave a token unfinished
  StoredPart* stored;    // [parts][heads]
  std::byte* scratch;    // [threads][scratch_bytes]
  size_t scratch_bytes;  // two rows of parts, then the kernel's own

  Memory(Arena& arena, const Shape& shape, const Need& need, const TileKernel& kernel) {
    const size_t own = kernel.scratch(shape.heads) + 2 * sizeof(Partial) * shape.heads;
    scratch_bytes = round_up(own, Arena::kAlign);
    slot_starts = arena.take<int32_t>(need.workers + 1);
    leavers = arena.take<int32_t>(need.workers);
    stored =
        arena.take<StoredPart>(max_parts(shape.tokens, need.tiles, need.workers) * shape.heads);
    scratch = arena.take<std::byte>(need.workers * scratch_bytes);
  }
};

// Blocks of heads that share a token's keys. Merging costs every thread the lines of all heads (17
// or 33 each), however many parts there are; a token cut into eight parts or more gives half of its
// heads to every second worker instead, for twice the keys: half of the lines, twice the packing.
int head_groups(const Params& p, int64_t workers) {
  constexpr int64_t kManyParts = 8;
  constexpr int32_t kManyHeads = 64;
  return !p.fixed_split && p.heads >= kManyHeads && workers >= kManyParts * p.tokens ? 2 : 1;
}

class Run {
 public:
  Run(const Params& p, const TileKernel& kernel, const Memory& memory)
      : p_(p),
        kernel_(kernel),
        memory_(memory),
        groups_(head_groups(p, std::ssize(p.schedule.worker_starts) - 1)),
        workers_((std::ssize(p.schedule.worker_starts) - 1) / groups_),
        pieces_(p.tokens > workers_ ? kPieces : 1) {
    memory.slot_starts[0] = 0;
    for (int64_t w = 0; w < workers_; ++w) {
      memory.slot_starts[w + 1] = memory.slot_starts[w] + continued(w) + unfinished(w);
      if (unfinished(w)) memory.leavers[leavers_++] = static_cast<int32_t>(w);
    }
  }

  void operator()() {
    // Whole tokens of a worker go to whoever is free: cores of a shared machine differ in speed.
    internal::cpu::parallel_for(workers_ * groups_ * pieces_, [this](int64_t task, int thread) {
      const int64_t w = task / groups_;
      work({w % workers_, static_cast<int>(w / workers_), heads(groups_, task % groups_)}, thread);
    });
    // Second pass: a token belongs to the worker that began it; heads are shared out.
    if (leavers_ == 0) return;
    const int64_t shares =
        std::min<int64_t>(ceil_div(kTasks * internal::cpu::threads(), leavers_), p_.heads);
    internal::cpu::parallel_for(leavers_ * shares, [&](int64_t task, int) {
      merge(memory_.leavers[task / shares], heads(shares, own_share(task % shares, shares)));
    });
  }

 private:
  static constexpr int kPieces = 16;  // of a worker's tiles, at the edges of tokens
  // Merging tasks of a thread: few, as each is handed out over one shared line and long runs of
  // lines are fetched faster. (Two: some 5 % slower at sixteen threads.)
  static constexpr int64_t kTasks = 1;
  static constexpr int64_t kAhead = 3;  // rows that a merge fetches early

  struct Heads {
    int32_t begin, end;
  };
  struct Work {
    int64_t worker;
    int piece;
    Heads heads;
  };

  Heads heads(int64_t shares, int64_t i) const {
    return {static_cast<int32_t>(p_.heads * i / shares),
            static_cast<int32_t>(p_.heads * (i + 1) / shares)};
  }
  // The share of the merge that falls to the thread of task i: where heads are in groups, one of
  // that task's group, of which it has just written a part. (1 % on sixteen threads.)
  int64_t own_share(int64_t i, int64_t shares) const {
    return shares % groups_ == 0 ? i % groups_ * (shares / groups_) + i / groups_ : i;
  }
  // Tiles of worker w; with groups of heads, those of as many workers of the schedule.
  int32_t first(int64_t w) const {
    return w < workers_ ? p_.schedule.worker_starts[w * groups_] : p_.schedule.worker_starts.back();
  }
  int32_t token_begin(int32_t tile) const {
    return p_.schedule.split_starts[p_.schedule.tiles[tile].token];
  }
  int32_t token_end(int32_t tile) const {
    return p_.schedule.split_starts[p_.schedule.tiles[tile].token + 1];
  }
  // Parts that worker w stores of a token that another worker began: fixed cuts stay what they are.
  int32_t continued(int64_t w) const {
    const int32_t a = first(w), b = first(w + 1);
    if (a == b || token_begin(a) == a) return 0;
    return p_.fixed_split ? std::min(b, token_end(a)) - a : 1;
  }
  // Whether worker w begins a token that others end.
  int32_t unfinished(int64_t w) const {
    const int32_t a = first(w), b = first(w + 1);
    return a < b && token_begin(b - 1) >= a && token_end(b - 1) > b;
  }
  // First tile of a worker's piece.
  int32_t piece_begin(int64_t w, int piece) const {
    const int32_t a = first(w), b = first(w + 1);
    const auto i = static_cast<int32_t>(a + ceil_div(int64_t{b - a} * piece, pieces_));
    return i < b && token_begin(i) < i && i > a ? std::min(b, token_end(i)) : i;
  }
  StoredPart* slot(int64_t index) const { return memory_.stored + index * p_.heads; }
  bool rounded() const { return kernel_.rounds && !p_.fixed_split; }

  // The call as it is for some of its heads.
  Params params_of(Heads h) const {
    Params p = p_;
    p.q += h.begin * p.q_head_stride;
    p.q_rope += h.begin * p.rope_head_stride;
    p.heads = h.end - h.begin;
    return p;
  }

  void work(const Work& work, int thread) const {
    const auto [w, piece, heads] = work;
    const Params p = params_of(heads);
    std::byte* scratch = memory_.scratch + thread * memory_.scratch_bytes;
    Partial* const own = reinterpret_cast<Partial*>(scratch);  // sums of several fixed tiles
    Partial* const parts = own + p_.heads;
    scratch = reinterpret_cast<std::byte*>(parts + p_.heads);
    const int32_t a = first(w), b = first(w + 1);
    const int32_t begin = piece_begin(w, piece), end = piece_begin(w, piece + 1);
    for (int32_t i = begin, next; i < end; i = next) {
      const Tile& tile = p_.schedule.tiles[i];
      const bool mine = token_begin(i) >= a, whole = mine && token_end(i) <= b;
      next = p_.fixed_split ? i + 1 : std::min(end, token_end(i));
      const bool begins = i == token_begin(i), ends = next == token_end(i);
      const bool several = mine && !(begins && (ends || next == b));
      StoredPart* to = nullptr;  // where a part goes that others continue
      if (!mine) to = slot(memory_.slot_starts[w] + i - a);
      else if (!whole && next == b) to = slot(memory_.slot_starts[w + 1] - 1);
      const auto receive = [&](int32_t head, const Partial& part) {
        const int32_t h = heads.begin + head;
        if (several && begins) own[h] = part;
        else if (several) fold(own[h], part);
        const Partial& sum = several ? own[h] : part;
        if (to && h + 2 < heads.end) fetch_to_write(to + h + 2);
        if (to) store(sum, rounded(), to[h]);
        else if (whole && ends) finish(p_, tile.token, h, sum);
      };
      const bool new_query = i == begin || tile.token != p_.schedule.tiles[i - 1].token;
      const int32_t last = p_.schedule.tiles[next - 1].end;
      // What follows is in this piece, or in the worker's next one, which goes to this thread
      // unless others are faster.
      const Tile* ahead = next < b ? &p_.schedule.tiles[next] : nullptr;
      const HeadReceiver ready(receive);
      kernel_.tile(p, {tile.token, tile.begin, last, new_query, parts, ready, ahead}, scratch);
    }
  }

  size_t stored_bytes() const {
    return rounded() ? offsetof(StoredPart, half) + sizeof(StoredPart::half) : sizeof(StoredPart);
  }
  // Asks for a part's lines as this core's own: the last merge has left them in another's cache.
  void fetch_to_write([[maybe_unused]] const StoredPart* part) const {
#if defined(__x86_64__)
    const char* bytes = reinterpret_cast<const char*>(part);
    for (size_t i = 0; i < stored_bytes(); i += 64) asm volatile("prefetchw %0" ::"m"(bytes[i]));
#endif
  }
  // Asks for a head of a part that another core has just written: lines that are not asked for
  // early take some 16 ns each.
  void fetch(const StoredPart* part) const {
    const char* bytes = reinterpret_cast<const char*>(part);
    for (size_t i = 0; i < stored_bytes(); i += 64) __builtin_prefetch(bytes + i, 0, 3);
  }

  // Folds the parts of the token that worker w left unfinished: w's own, then those that the next
  // workers stored, which follow it.
  void merge(int64_t w, Heads heads) const {
    const int32_t last_tile = first(w + 1) - 1, end = token_end(last_tile);
    const int64_t begin = memory_.slot_starts[w + 1] - 1;
    int64_t parts = 1;
    for (int64_t next = w + 1; next < workers_ && first(next) < end; ++next)
      parts += continued(next);
    const auto part = [&](int64_t i) {  // all parts of a head, then the next head's
      return slot(begin + i % parts) + heads.begin + i / parts;
    };
    const int64_t count = parts * (heads.end - heads.begin);
    for (int64_t i = 0; i < std::min(kAhead, count); ++i) fetch(part(i));
    Partial sum;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) fetch(part(i + kAhead));
      if (i % parts == 0) load(*part(i), sum);
      else fold(sum, *part(i));
      if (i % parts == parts - 1)
        finish(p_, p_.schedule.tiles[last_tile].token,
               heads.begin + static_cast<int32_t>(i / parts), sum);
    }
  }

  const Params& p_;
  const TileKernel& kernel_;
  const Memory& memory_;
  const int groups_;  // of heads
  const int64_t workers_;
  const int pieces_;
  int64_t leavers_ = 0;
};

}  // namespace

void run_tiles(const Params& p, const TileKernel& kernel) noexcept {
  if (p.tokens == 0) return;
  Arena arena(p.workspace);
  const Shape shape{.heads = p.heads, .tokens = p.tokens};
  const auto workers = static_cast<int64_t>(p.schedule.worker_starts.size()) - 1;
  const Need need{static_cast<int64_t>(p.schedule.tiles.size()),
                  std::max<int64_t>(workers, internal::cpu::threads())};
  const Memory memory(arena, shape, need, kernel);
  Run(p, kernel, memory)();
}

size_t tile_workspace(const Shape& shape, int64_t tiles, const TileKernel& kernel) {
  Arena arena;
  Memory(arena, shape, {tiles, internal::cpu::threads()}, kernel);
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

}  // namespace winnow::internal::attend::cpu
