#include "memory.h"

#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace winnow::emulated {

namespace {

struct Pieces {
  std::shared_mutex mutex;
  std::map<uint64_t, size_t> bytes_at;
};
// Never destroyed: programs give memory back from their own static objects' destructors.
Pieces& pieces() {
  static Pieces* const all = new Pieces;
  return *all;
}

// Moves on when memory is taken away: what threads remember of pieces is void then. An address of
// 0 bytes is in no piece, so new memory needs no move.
std::atomic<uint64_t> removals{1};

struct Piece {
  uint64_t begin = 0;
  size_t bytes = 0;
  bool holds(uint64_t address, size_t count) const {
    const uint64_t offset = address - begin;
    return offset <= bytes && count <= bytes - offset;
  }
};

// The pieces that a thread saw last. A kernel goes back and forth between a few of them: queries,
// records, lists, results, the workspace.
struct Seen {
  static constexpr unsigned kPieces = 8;
  uint64_t removals = 0;
  unsigned last = 0, next = 0;
  Piece piece[kPieces];
};
thread_local Seen seen;

// Apart, so that holds() stays short.
[[gnu::noinline]] bool holds_elsewhere(uint64_t address, size_t bytes) {
  if (const uint64_t now = removals.load(std::memory_order_relaxed); seen.removals != now) {
    seen = {};
    seen.removals = now;
  }
  for (unsigned i = 0; i < Seen::kPieces; ++i)
    if (seen.piece[i].holds(address, bytes)) {
      seen.last = i;
      return true;
    }
  Pieces& all = pieces();
  const std::shared_lock lock(all.mutex);
  auto next = all.bytes_at.upper_bound(address);
  if (next == all.bytes_at.begin()) return false;
  --next;
  const Piece found{next->first, next->second};
  if (!found.holds(address, bytes)) return false;
  seen.last = seen.next;
  seen.next = (seen.next + 1) % Seen::kPieces;
  seen.piece[seen.last] = found;
  return true;
}

}  // namespace

void add_memory(void* begin, size_t bytes) {
  if (bytes == 0) throw std::invalid_argument("add_memory: expected bytes, found none");
  const auto first = reinterpret_cast<uint64_t>(begin);
  Pieces& all = pieces();
  const std::unique_lock lock(all.mutex);
  const auto next = all.bytes_at.lower_bound(first);
  bool apart = next == all.bytes_at.end() || next->first - first >= bytes;
  if (next != all.bytes_at.begin()) {
    const auto before = std::prev(next);
    apart = apart && first - before->first >= before->second;
  }
  if (!apart) throw std::invalid_argument("add_memory: the memory overlaps what was added before");
  all.bytes_at.emplace_hint(next, first, bytes);
}

size_t remove_memory(void* begin) {
  Pieces& all = pieces();
  const std::unique_lock lock(all.mutex);
  const auto found = all.bytes_at.find(reinterpret_cast<uint64_t>(begin));
  if (found == all.bytes_at.end()) return 0;
  const size_t bytes = found->second;
  all.bytes_at.erase(found);
  removals.fetch_add(1, std::memory_order_relaxed);
  return bytes;
}

bool holds(uint64_t address, size_t bytes) {
  if (bytes == 0) return true;
  const Piece& last = seen.piece[seen.last];
  if (seen.removals == removals.load(std::memory_order_relaxed) && last.holds(address, bytes))
    return true;
  return holds_elsewhere(address, bytes);
}

}  // namespace winnow::emulated
