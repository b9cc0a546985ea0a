// Several ranks: how bytes move between them, and which part of a context each of them holds.
// winnow brings no transport. An engine's communicator moves equal blocks of bytes, and winnow does
// all arithmetic, so results have the same bits over every transport. docs/parallel.md shows which
// way of sharing work to choose.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

// A communicator with more ranks is refused: the messages by which ranks agree grow with them.
inline constexpr int32_t kMaxRanks = 1 << 14;

// A group of ranks that moves bytes. <winnow/mpi.h> and <winnow/nccl.h> are adapters; write your
// own by deriving from this class. All ranks make the same calls in the same order, and blocks have
// one size on all of them.
//
// Every call ends: with the bytes, or with Error(kRuntime) after the communicator's own deadline.
// After an error the communicator is spent, and every later call throws at once. Buffers of a call
// that failed may still be written until the transport itself is shut down.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int32_t rank() const noexcept = 0;
  virtual int32_t size() const noexcept = 0;  // 1 to kMaxRanks
  // For messages: "mpi", "nccl".
  virtual const char* name() const noexcept = 0;
  // Whether all_gather and all_to_all take memory of this kind of device.
  virtual bool takes(DeviceKind kind) const noexcept = 0;
  // recv [size, bytes]: block r is what rank r sent. On CUDA the call is queued on device.stream.
  virtual void all_gather(const void* send, void* recv, size_t bytes, const Device& device) = 0;
  // send and recv [size, bytes]: block r of recv is block rank() of what rank r sent.
  virtual void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) = 0;
  // all_gather of host memory, done on return: how ranks agree. Names the ranks that are missing.
  virtual void exchange(const void* send, void* recv, size_t bytes) = 0;
  // Throws if a queued call has failed since it returned.
  virtual void check() = 0;
};

// Which positions of a context a rank holds: position p is on rank (p / interleave) % world, as
// local position (p / (world * interleave)) * interleave + p % interleave. Local order is the
// global order of the rank's positions.
struct Shard {
  int32_t world = 1;
  int32_t rank = 0;
  int32_t interleave = 1;

  constexpr int32_t owner(int64_t position) const {
    return static_cast<int32_t>(position / interleave % world);
  }
  constexpr bool owns(int64_t position) const { return owner(position) == rank; }
  // Where a position stands on its owner.
  constexpr int64_t local(int64_t position) const {
    const int64_t round = int64_t{world} * interleave;
    return position / round * interleave + position % interleave;
  }
  // The position that stands at `local` on this rank.
  constexpr int64_t global(int64_t local) const {
    return (local / interleave * world + rank) * interleave + local % interleave;
  }
  // How many of the positions [0, length) this rank holds.
  constexpr int64_t local_length(int64_t length) const {
    const int64_t round = int64_t{world} * interleave;
    const int64_t rest = length % round - int64_t{rank} * interleave;
    const int64_t own = rest < 0 ? 0 : rest > interleave ? interleave : rest;
    return length / round * interleave + own;
  }
  bool operator==(const Shard&) const = default;
};

// What ranks share out.
enum class Spread : uint8_t {
  // Nothing: one rank, or requests that live whole on one rank (data-parallel attention).
  kNone,
  // Query heads; every rank holds whole caches. The score, which does not depend on the heads, is
  // shared out as well: its rows if there are as many tokens as ranks, else its keys.
  kHeads,
  // Positions of the context: caches hold this rank's Shard. Every rank has all tokens and heads.
  // V4: of its compressed states, by their number; the window and the compressor's state are whole
  // on every rank, and window position p is attended to by rank (p / interleave) % world alone.
  kContext,
  // Query tokens, for prefill: a rank computes the queries, keys and outputs of the positions that
  // its Shard has, with all heads. New records travel quantised. Every rank holds whole caches, or
  // with Parallel::sharded its Shard of them. V3.2 alone.
  kQueries,
};

// The number format of partial outputs between ranks.
enum class Wire : uint8_t {
  kF32,   // 2,052 B a token and head
  kBf16,  // 1,028 B; rounds once more
};

// How the ranks of a plan work together (PlanOptions::parallel). All ranks must pass the same; the
// plan's constructor and refill() compare it over the ranks.
struct Parallel {
  // Outlives the plan. None: one rank.
  Communicator* comm = nullptr;
  Spread spread = Spread::kNone;
  // kContext, kQueries: consecutive positions on one rank. The page size keeps a page on one rank.
  int32_t interleave = 1;
  Wire wire = Wire::kF32;
  // Where the ranks agree, if `comm` has no fast way for host memory. None: comm->exchange().
  Communicator* control = nullptr;
  // kQueries: caches hold this rank's Shard, as with kContext, and what they hold of a batch's
  // sequences is gathered for every layer (<winnow/gather_prefix.h>). A batch for which
  // context_is_cheaper() runs over kContext on the same caches.
  bool sharded = false;

  // kContext, kQueries: the positions of this rank.
  Shard shard() const {
    const bool by_position = spread == Spread::kContext || spread == Spread::kQueries;
    return comm && by_position ? Shard{comm->size(), comm->rank(), interleave} : Shard{};
  }
};

// V3.2 with sharded caches: whether `tokens` new tokens after a context of `context` bring fewer
// bytes into a rank over kContext (queries, candidates and outputs, 427 KB a token with 128 heads)
// than over kQueries (788 B for every token of the context).
constexpr bool context_is_cheaper(int64_t tokens, int64_t context) {
  return tokens < context / 540;
}

}  // namespace winnow
